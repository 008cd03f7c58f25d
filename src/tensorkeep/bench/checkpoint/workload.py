"""The workload of checkpoints: a state is saved by a tool, and loaded cold and warm, bit for bit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tensorkeep.bench.checkpoint import measure
from tensorkeep.bench.checkpoint.models import build, parse
from tensorkeep.bench.checkpoint.probes import check_room
from tensorkeep.bench.checkpoint.subject import Subject
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.checkpoint.tools.known import make
from tensorkeep.bench.checkpoint.training_state import check_optimizer, with_optimizer
from tensorkeep.bench.experiment.json_fields import Fields
from tensorkeep.bench.experiment.workload import Outcome, Prepared, Task, Workload
from tensorkeep.bench.results import Measure
from tensorkeep.checkpoint.inspect.info import info
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import flatten
from tensorkeep.units import format_bytes

SEED = 20_240_601
"""Of the random weights."""

DEFAULT_MODEL = "openllama-3b:scale=0.03:layers=4:float16"
"""44 MB in matrices of 0.3 to 3 million weights: an arm with chunks of 64 x 64 saves it in seconds, not minutes."""

_SETTINGS = ("model", "slow_model", "from", "with_optimizer", "into", "save_dir")
_OVERHEAD = 512 * 1024**2
_WIDENED = 2.1
"""How many times its bytes a state of half precision may take on the disk: as float32, and a little."""
_WARM_UP_ELEMENTS = 4096

MEASURES = (
    Measure(measure.SAVE, "durable save", "s", "until the checkpoint is safely on the disk (fsync)", primary=True),
    Measure(measure.RETURNED, "save returned", "s", "until the call returned, whatever was on the disk by then"),
    Measure(measure.COLD, "load, cold", "s", "nothing of the files was in memory (mincore)", primary=True),
    Measure(measure.WARM, "load, warm", "s", "the operating system still had the files in memory", primary=True),
    Measure(measure.INTO_COLD, "load into, cold", "s", "into tensors that exist, as when a training run goes on"),
    Measure(measure.INTO_WARM, "load into, warm", "s", "into tensors that exist, the files still in memory"),
    Measure(measure.STORED, "on disk", "B", "the bytes of all files", primary=True),
    Measure(measure.WRITTEN, "written", "B", "what the kernel counted as written during the save"),
    Measure(measure.FILES, "files", "1", "how many files there are"),
    Measure(measure.PEAK, "peak memory", "B", "the most resident memory during the save, beyond the state"),
)


class CheckpointWorkload(Workload):
    """Settings of an experiment: ``model`` (a spec) or ``from`` (a checkpoint), ``slow_model``, ``with_optimizer``,
    ``into`` (whether loads into existing tensors are measured). An arm's settings name a tool; see
    `tensorkeep.bench.checkpoint.tools.known`.
    """

    name: ClassVar[str] = "checkpoint"
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    def settings(self, given: object, path: str | None) -> dict[str, Any]:
        fields = Fields(given, "settings", path or "", _SETTINGS)
        example = f'"{DEFAULT_MODEL}"'
        found = {
            "model": fields.text("model", None, example=example),
            "slow_model": fields.text("slow_model", None, example=example),
            "from": fields.text("from", None, example='"path/to/checkpoint"'),
            "with_optimizer": fields.text("with_optimizer", None, example='"adamw"'),
            "into": fields.flag("into", False),
            "save_dir": fields.text("save_dir", None, example='"runs/"'),
        }
        if found["model"] is not None and found["from"] is not None:
            fields.refuse('has both "model" and "from"', remedy="keep one of them")
        if found["model"] is None and found["from"] is None:
            found["model"] = DEFAULT_MODEL
        models = (found["model"], found["slow_model"])
        for model in models:
            if model is not None:
                parse(model)
        if found["with_optimizer"] is not None:
            check_optimizer(found["with_optimizer"])
            if any(model is not None and parse(model).dtype == "float16" for model in models):
                # The squares of its gradients underflow, and every weight becomes infinite.
                fields.refuse("asks for AdamW of float16 weights", remedy="give a model in bfloat16 or float32")
        return found

    def check(self, settings: Mapping[str, Any]) -> None:
        make(settings)

    def missing(self, settings: Mapping[str, Any]) -> str | None:
        return make(settings).missing()

    def prepare(self, settings: Mapping[str, Any], arms: Collection[Mapping[str, Any]], scratch: Path) -> Prepared:
        subject = _subject(settings, settings["model"])
        slow = _subject(settings, settings["slow_model"]) if settings["slow_model"] else subject
        sizes = [_nbytes(each) for each in (subject, slow)]
        made = sum(size for size, each in zip(sizes, (subject, slow), strict=True) if "model" in each)
        widened = any(make(arm).needs == "tensorstore" for arm in arms)
        check_room(
            scratch,
            disk=round(made + max(sizes) * (_WIDENED if widened else 1.1)) + _OVERHEAD // 8,
            memory=(3 if settings["into"] else 2) * max(sizes) + _OVERHEAD,
        )
        described = _make(subject, scratch / "subject.ckpt")
        slow_described = described if slow is subject else _make(slow, scratch / "slow-subject.ckpt")
        return Prepared(subject, slow, described, slow_described)

    def measures_of(self, settings: Mapping[str, Any]) -> list[str]:
        optional = () if settings["into"] else (measure.INTO_COLD, measure.INTO_WARM)
        return [measure.name for measure in MEASURES if measure.name not in optional]

    def measure(self, task: Task) -> Outcome:
        tool = make(task.settings)
        folder = Path(task.directory)
        begin = time.perf_counter()
        subject = Subject(_load(task.subject))
        built = time.perf_counter()
        _warm_up(tool, folder)
        warmed = time.perf_counter()
        found = measure.visit(tool, task.arm, subject, folder / f"state{tool.suffix}", task.measures)
        clocks = {"build": built - begin, "warm-up": warmed - built, **found.clocks}
        return Outcome(found.figures, clocks)


def _subject(settings: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    if model is None:
        return {"checkpoint": str(settings["from"])}
    return {"model": model, "with_optimizer": settings["with_optimizer"]}


def _nbytes(subject: Mapping[str, Any]) -> int:
    if "model" not in subject:
        return info(subject["checkpoint"]).total.nbytes
    return parse(subject["model"]).nbytes * (3 if subject["with_optimizer"] else 1)


def _make(subject: dict[str, Any], path: Path) -> dict[str, Any]:
    """Describe a subject; one that is made up is stored once, so that each cell has it in a second."""
    if "model" not in subject:
        flat = flatten(load(subject["checkpoint"]))
        return _described(subject["checkpoint"], flat.leaves.values())
    state = _build(subject)
    save(state, path, compression="none")
    subject["checkpoint"] = str(path)
    name = subject["model"] + (f" with {subject['with_optimizer']}" if subject["with_optimizer"] else "")
    return _described(name, flatten(state).leaves.values())


def _build(subject: Mapping[str, Any]) -> dict[str, Any]:
    tensors = build(subject["model"], seed=SEED)
    optimizer = subject["with_optimizer"]
    return with_optimizer(tensors, optimizer, seed=SEED) if optimizer else dict(tensors)


def _described(name: str, leaves: Iterable[Source]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    count = 0
    for leaf in leaves:
        dtypes[leaf.dtype.name] += leaf.nbytes
        count += 1
    nbytes = sum(dtypes.values())
    sentence = f"{name}: {count:,} tensors, {format_bytes(nbytes)}"
    return {"description": sentence, "tensors": count, "bytes": nbytes, "dtypes": dict(dtypes)}


def _load(subject: Mapping[str, Any]) -> Any:
    stored = subject.get("checkpoint")
    # A cell that is run again by hand, after the run removed what it made, makes it again.
    if stored is None or ("model" in subject and not Path(stored).exists()):
        return _build(subject)
    return load(stored)


def _warm_up(tool: Tool, folder: Path) -> None:
    """Save and load a few kilobytes, so that what is imported and set up on the first call is not part of a figure."""
    import torch

    path = folder / f"warm-up{tool.suffix}"
    state = tool.view({"a": torch.ones(_WARM_UP_ELEMENTS), "b": torch.ones(2, 2)})
    try:
        tool.save(state, path)
        tool.load(path)
    finally:
        measure.remove(path)


WORKLOAD = CheckpointWorkload()
