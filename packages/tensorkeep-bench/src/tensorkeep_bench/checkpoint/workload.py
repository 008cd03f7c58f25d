"""The checkpoint workload: a tool saves a state and loads it, cold and warm, and every bit is compared."""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from tensorkeep import info, load, save
from tensorkeep.errors import UsageError
from tensorkeep.ext import format_bytes, prepared
from tensorkeep.ext.state import flatten
from tensorkeep_bench.checkpoint import measure
from tensorkeep_bench.checkpoint.files import KEPT, check_capacity
from tensorkeep_bench.checkpoint.measure import call_once
from tensorkeep_bench.checkpoint.models import add_adamw_state, build, parse
from tensorkeep_bench.checkpoint.states import StatePair
from tensorkeep_bench.checkpoint.tools import TensorstoreTool, Tool, parse_tool, use_of
from tensorkeep_bench.results import Measure, Settings, Subject
from tensorkeep_bench.workload import Outcome, PreparedInput, PreparedInputs, Task, Workload, convert

SEED = 20_240_601  # of the random weights

# 44 MB in matrices of 0.3 to 3 million weights: an arm with chunks of 64 x 64 saves it in seconds.
DEFAULT_MODEL = "openllama-3b:scale=0.03:layers=4:float16"

_OVERHEAD_BYTES = 512 * 1024**2
# Bytes on disk of a half-precision state stored as float32, in multiples of its own bytes, with a margin.
_WIDENED = 2.1

MEASURES = (
    Measure(measure.SAVE, "durable save", "s", "until the checkpoint is safely on the disk (fsync)", primary=True),
    Measure(measure.RETURNED, "save returned", "s", "until the call returned, durable or not"),
    Measure(measure.FIRST, "first load", "s", "in a new process that has loaded nothing; files cached", primary=True),
    Measure(measure.COLD, "load, cold", "s", "none of the files in the page cache (mincore)", primary=True),
    Measure(measure.WARM, "load, warm", "s", "a repeated load, all of the files in the page cache", primary=True),
    Measure(measure.INTO_FIRST, "first load into", "s", "into existing tensors, in a new process; files cached"),
    Measure(measure.INTO_COLD, "load into, cold", "s", "into existing tensors, as when a training run resumes"),
    Measure(measure.INTO_WARM, "load into, warm", "s", "into existing tensors, the files in the page cache"),
    Measure(measure.STORED, "on disk", "B", "the bytes of all files", primary=True),
    Measure(measure.WRITTEN, "written", "B", "what the kernel counted as written during the save"),
    Measure(measure.FILES, "files", "1", "the number of files"),
    Measure(measure.PEAK, "peak memory", "B", "the most resident memory during the save, beyond the state"),
)


class CheckpointSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"source": "from"}
):
    model: str | None = None  # the spec of the state, see `tensorkeep_bench.checkpoint.models`; None with ``source``
    slow_model: str | None = None  # the spec for arms that are marked slow
    source: str | None = None  # ``from`` in JSON: the path of a checkpoint to use instead of a model
    with_optimizer: Literal["adamw"] | None = None  # adds the optimizer's state
    into: bool = False  # whether loads into existing tensors are measured, too
    save_dir: str | None = None  # the folder on the disk that is measured
    keep: bool = False  # whether the last checkpoint of each arm is kept there


class CheckpointInput(msgspec.Struct, frozen=True):
    """The state that a cell saves: a stored checkpoint, or the model that it is built from if that is gone."""

    model: str | None = None
    with_optimizer: str | None = None
    checkpoint: str | None = None
    keep: str | None = None  # the folder that the checkpoint of an arm is moved to when it was measured

    @property
    def nbytes(self) -> int:
        if self.model is None:
            return info(str(self.checkpoint)).total.nbytes
        # AdamW has two moments for each weight.
        return parse(self.model).nbytes * (3 if self.with_optimizer else 1)

    def build(self) -> dict[str, Any]:
        tensors = build(str(self.model), seed=SEED)
        return add_adamw_state(tensors, seed=SEED) if self.with_optimizer else dict(tensors)

    def load(self) -> Any:
        # When a user runs a cell again after the run, its stored model was removed.
        if self.model is not None and (self.checkpoint is None or not Path(self.checkpoint).exists()):
            return self.build()
        return load(str(self.checkpoint))


class CheckpointWorkload(Workload[CheckpointSettings, Tool]):
    """Saves and loads a state; an arm is a `Tool` with its settings."""

    name: ClassVar[str] = "checkpoint"
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    def parse_settings(self, given: Mapping[str, object]) -> CheckpointSettings:
        settings = convert(dict(given), CheckpointSettings, what="settings")
        if settings.model is not None and settings.source is not None:
            raise UsageError('settings have both "model" and "from"', remedy="keep one of them")
        if settings.model is None and settings.source is None:
            settings = msgspec.structs.replace(settings, model=DEFAULT_MODEL)
        specs = [parse(model) for model in (settings.model, settings.slow_model) if model is not None]
        if settings.with_optimizer and any(spec.dtype == "float16" for spec in specs):
            # The squares of the gradients underflow, and every weight becomes infinite.
            message = "settings combine AdamW with float16 weights"
            raise UsageError(message, remedy="give a model in bfloat16 or float32")
        return settings

    def parse_arm(self, given: Mapping[str, object]) -> Tool:
        return parse_tool(given)

    def missing(self, arm: Tool) -> str | None:
        return arm.missing()

    def prepare(self, settings: CheckpointSettings, arms: Collection[Tool], scratch: Path) -> PreparedInputs:
        keep = str(scratch.parent / KEPT) if settings.keep else None
        inputs = [CheckpointInput(settings.model, settings.with_optimizer, settings.source, keep)]
        if settings.slow_model is not None:
            inputs.append(CheckpointInput(settings.slow_model, settings.with_optimizer, keep=keep))
        stored = sum(each.nbytes for each in inputs if each.model is not None)
        largest = max(each.nbytes for each in inputs)
        # Some settings convert parameters to float32, which doubles a state in half precision.
        widened = any(isinstance(arm, TensorstoreTool) for arm in arms)
        copies = 1 + (len(arms) if settings.keep else 0)
        check_capacity(
            scratch,
            disk=round(stored + copies * largest * (_WIDENED if widened else 1.1)) + _OVERHEAD_BYTES // 8,
            # The source, what a load returns, and the tensors to load into.
            memory=(3 if settings.into else 2) * largest + _OVERHEAD_BYTES,
        )
        places = (scratch / "model.ckpt", scratch / "slow-model.ckpt")
        found = [_store(*each) for each in zip(inputs, places, strict=False)]
        return found[0], found[-1]

    def measures_of(self, settings: CheckpointSettings) -> list[str]:
        optional = () if settings.into else (measure.INTO_FIRST, measure.INTO_COLD, measure.INTO_WARM)
        return [each.name for each in MEASURES if each.name not in optional]

    def use(self, settings: Settings, arm: Settings) -> str:
        return use_of(arm)

    def measure(self, task: Task) -> Outcome:
        tool = parse_tool(task.settings)
        folder = Path(task.directory)
        first = Outcome()
        given = msgspec.convert(task.input, prepared(CheckpointInput))
        with first.clock("build"):
            states = StatePair(given.load())
        with first.clock("first call"):
            # Imports and other work of the first call are in no figure.
            call_once(tool, folder)
        path = folder / f"state{tool.suffix}"
        # The A/A control has the settings of the baseline, and would keep the same files again.
        is_control = task.settings == task.baseline
        keep = None if given.keep is None or is_control else Path(given.keep) / f"{task.arm}{tool.suffix}"
        outcome = measure.measure_tool(tool, task.arm, states, path, task.measures, keep)
        return msgspec.structs.replace(outcome, clocks={**first.clocks, **outcome.clocks})


def _store(given: CheckpointInput, path: Path) -> PreparedInput:
    if given.model is None:
        return PreparedInput(given, _describe(str(given.checkpoint), load(str(given.checkpoint))))
    state = given.build()
    # Stored once, so that each cell loads the model in a second instead of drawing it.
    save(state, path, compression="none")
    name = given.model + (f" with {given.with_optimizer}" if given.with_optimizer else "")
    return PreparedInput(msgspec.structs.replace(given, checkpoint=str(path)), _describe(name, state))


def _describe(name: str, state: Any) -> Subject:
    leaves = flatten(state).leaves.values()
    dtypes: Counter[str] = Counter()
    for leaf in leaves:
        dtypes[leaf.dtype.name] += leaf.nbytes
    nbytes = sum(dtypes.values())
    return Subject(f"{name}: {len(leaves):,} tensors, {format_bytes(nbytes)}", len(leaves), nbytes, dict(dtypes))


WORKLOAD = CheckpointWorkload()
