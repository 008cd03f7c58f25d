"""Parts 1 and 5 of the demo: how fast each tool saves and loads, and the six-way comparison with Tensorkeep."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tensorkeep import info, load
from tensorkeep.errors import StoreError, TensorkeepError
from tensorkeep.ext import format_bytes, prepared
from tensorkeep_bench.checkpoint import measure
from tensorkeep_bench.checkpoint.files import check_capacity, remove, stored_bytes, warm
from tensorkeep_bench.checkpoint.models import build, parse
from tensorkeep_bench.checkpoint.states import COPIES_IN_MEMORY, StatePair, check_equal
from tensorkeep_bench.checkpoint.tools import COMMON_TOOLS, TensorstoreTool, Tool, parse_tool
from tensorkeep_bench.checkpoint.workload import CheckpointInput
from tensorkeep_bench.experiment import ExperimentPlan, read_experiment
from tensorkeep_bench.results import FILE_NAME, Arm, CellRecord, Limits, Results
from tensorkeep_bench.run.cell import failed_outcome
from tensorkeep_bench.run.runner import ExperimentRun, plan_results, run_rounds
from tensorkeep_bench.statistics import Description, describe
from tensorkeep_bench.workload import Outcome, Task

DEFAULT_SCALE = 0.1
SEED = 20_240_601
LONGEST_SECONDS = 40.0  # seconds after which no further round starts
SPEED_MEASURES = (measure.SAVE, measure.FIRST, measure.STORED)

T5X = parse_tool({"tool": "t5x"})
# The common tools, and TensorStore with the fastest of its settings that detect damage.
_TENSORSTORE = {"zarr": 3, "chunk": "64MiB", "dtype": "keep", "in_flight": "all", "compressor": None}
TOOLS: dict[str, Tool] = {
    **COMMON_TOOLS,
    "tensorstore": parse_tool({"tool": "tensorstore", "checksum": "crc32c", **_TENSORSTORE}),
}

_COPIES_ON_DISK = 3
_OVERHEAD_BYTES = 512 * 1024**2
_T5X_FRACTION = 0.1


@contextmanager
def temporary_folder(directory: Path) -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="tensorkeep-demo-", dir=directory)
    except OSError as error:
        message = f"cannot write here: {error.strerror}"
        raise StoreError(message, path=directory, remedy="choose a folder with --dir") from error
    with folder as path:
        yield Path(path)


def scale_of_size(nbytes: int) -> float:
    return nbytes / parse("openllama-3b").nbytes


def build_states(folder: Path, source: Path | None, scale: float) -> StatePair:
    """Load a checkpoint, or build OpenLLaMA-3B at a scale; StoreError if memory or disk do not suffice."""
    # Without an exponent, which a spec does not allow.
    spec = f"openllama-3b:scale={scale:.10f}"
    nbytes = parse(spec).nbytes if source is None else info(source).total.nbytes
    disk, memory = _COPIES_ON_DISK * nbytes, COPIES_IN_MEMORY * nbytes
    check_capacity(folder, disk=disk + _OVERHEAD_BYTES, memory=memory + _OVERHEAD_BYTES)
    return StatePair(build(spec, seed=SEED) if source is None else load(source))


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in seconds or bytes, and the ratio to torch by round: its speedup, or the fraction of its bytes."""

    median: float
    against_torch: Description | None


@dataclass(frozen=True, slots=True)
class SmallRun:
    """One run of a slow tool on the first tensors of the state: their bytes, and the figures by measure."""

    state_bytes: int
    figures: dict[str, float]
    not_run: str = ""

    def scaled(self, figure: str, nbytes: int) -> float | None:
        value = self.figures.get(figure)
        # As if the figure grew with the bytes.
        return None if value is None else value * nbytes / self.state_bytes


def measure_rounds(
    states: StatePair,
    folder: Path,
    rounds: int,
    *,
    seconds: float | None = None,
    seed: int,
    progress: Callable[[str], None],
) -> Results:
    arms = {name: partial(_save_and_load, tool, name, states, folder) for name, tool in TOOLS.items()}
    total = rounds * len(arms)

    def report(done: int, arm: str) -> None:
        progress(f"saving and loading with {arm} ({done + 1} of at most {total})")

    return run_rounds(arms, rounds, seed=seed, seconds=seconds, progress=report)


def measure_t5x(states: StatePair, folder: Path) -> SmallRun:
    if reason := T5X.missing():
        return SmallRun(0, {}, reason)
    first, nbytes = {}, 0
    for name, tensor in T5X.view(states.source).items():
        # About a tenth of the bytes: gzip takes too long for all.
        if nbytes < states.nbytes * _T5X_FRACTION:
            first[name] = tensor
            nbytes += tensor.nbytes
    outcome = _save_and_load(T5X, "t5x", StatePair(first), folder)
    return SmallRun(nbytes, outcome.figures, outcome.reason or "")


def _save_and_load(tool: Tool, name: str, states: StatePair, folder: Path) -> Outcome:
    if reason := tool.missing():
        return Outcome("not-run", reason)
    path = folder / f"state{tool.suffix}"

    def measure_once() -> Outcome:
        _, saving = measure.save_durably(tool, tool.view(states.source), path)
        # Cached, so that the speed of the disk does not hide the work of the tool.
        warm(path)
        loading = measure.first_load(tool, path, states.expected_from(tool), name)
        return Outcome(figures={measure.SAVE: saving, measure.FIRST: loading, measure.STORED: stored_bytes(path)})

    try:
        return measure.outcome_of(name, measure_once)
    finally:
        remove(path)


def figures(rounds: Results) -> dict[str, dict[str, Figure]]:
    found: dict[str, dict[str, Figure]] = {}
    for name in SPEED_MEASURES:
        for arm in [arm for arm in TOOLS if arm not in rounds.failures]:
            values = list(rounds.figures(arm, name).values())
            own, torch = (arm, name), ("torch", name)
            # A speedup of times, a fraction of bytes.
            ratios = rounds.ratios(own, torch) if name == measure.STORED else rounds.ratios(torch, own)
            if values:
                figure = Figure(describe(values).median, describe(ratios) if ratios else None)
                found.setdefault(name, {})[arm] = figure
    return found


def notes(rounds: Results, t5x: SmallRun) -> list[str]:
    found = [f"{arm} was not run: {reason}." for arm, reason in rounds.failures.items()]
    if t5x.figures:
        size = format_bytes(t5x.state_bytes)
        scaled = f"one run on {size}, scaled to the full state; its longest bars are cut off"
        found.append(f"* T5X's settings (gzip) take too long: {scaled}.")
    return found


# Part 5

_OURS = (
    Arm("tensorkeep", settings={"tool": "tensorkeep"}, about="tensorkeep.save: raw, durable, verified."),
    Arm("tensorkeep-lossless", settings={"tool": "tensorkeep", "compression": "lossless"}, about="A third smaller."),
)
_MODELS = {"model": "openllama-3b:scale=0.04:float16", "slow_model": "openllama-3b:scale=0.012:layers=2:float16"}


def compare_six_ways(folder: Path, progress: Callable[[str], None]) -> Results:
    """Save and load once with each arm of the experiment ``six-way``, and with Tensorkeep, in this process."""
    shipped = read_experiment("six-way")
    arms = [
        # The arms of TensorStore are slow and work on a smaller state, so the figures are compared per byte.
        replace(arm, slow=isinstance(parse_tool(arm.settings), TensorstoreTool))
        for arm in shipped.arms
        if arm.role != "control"
    ]
    experiment = replace(
        shipped.experiment,
        title="Six ways to checkpoint, and Tensorkeep",
        # One run gives no verdict, with or without a control.
        control=False,
        settings={**shipped.experiment.settings, **_MODELS},
    )
    planned = plan_results(ExperimentPlan(experiment, (*arms, *_OURS)).with_design(runs=1), "tensorkeep demo")
    measures = tuple(each for each in planned.measures if each.name in (measure.SAVE, measure.WARM, measure.STORED))
    run = ExperimentRun(replace(planned, measures=measures), folder / FILE_NAME, folder, _run_once)

    def report(cell: CellRecord, done: int, total: int, seconds_left: float | None) -> None:
        progress(f"six ways: {cell.arm} ({min(done + 1, total)} of {total})")

    run.execute(report)
    return run.results


def _run_once(task: Task, limits: Limits) -> Outcome:
    tool = parse_tool(task.settings)
    if reason := tool.missing():
        return Outcome("not-run", reason)
    folder = Path(task.directory)
    folder.mkdir()
    path = folder / f"state{tool.suffix}"
    try:
        state = tool.view(msgspec.convert(task.input, prepared(CheckpointInput)).load())
        _, saving = measure.save_durably(tool, state, path)
        begin = time.perf_counter()
        loaded = measure.read_state(tool, path)
        loading = time.perf_counter() - begin
        check_equal(loaded, state, task.arm)
    except TensorkeepError as error:
        # This process runs all arms: an error of one must not end the demo.
        return failed_outcome(error)
    else:
        taken = {measure.SAVE: saving, measure.WARM: loading, measure.STORED: stored_bytes(path)}
        return Outcome(seconds=saving + loading, figures=taken)
    finally:
        remove(folder)
