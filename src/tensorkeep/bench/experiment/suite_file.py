"""The configuration file of an isolated-optimisation suite, run unchanged: ``testing`` and ``test_configurations``.

Its shape: ``testing: {num_runs, save_dir, use_gpu}``, ``test_configurations: [{name, chunk_size_elements,
concurrency_limit, compression}]``, ``custom_tests: {enabled, configurations: [...]}``. Every configuration is an arm
that writes one zarr 2 directory per parameter in float32, one after the other. Chunks of 64 elements are at most 64
along each dimension, as such suites have it; any other number is the elements of a chunk, reached by halving the
largest dimension. ``compression: null`` is raw: naming no compressor would compress with Blosc.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorkeep.bench.experiment.experiment import MOST_RUNS, Experiment
from tensorkeep.bench.experiment.file import checked_name, finished
from tensorkeep.bench.experiment.json_fields import Fields
from tensorkeep.bench.experiment.values import PlannedArm
from tensorkeep.bench.experiment.workload import get as get_workload
from tensorkeep.bench.results import Limits

BASELINE = "baseline"
"""What the configuration is called that the others are compared with; without one, the first is it."""

_TOP = ("testing", "test_configurations", "custom_tests")
_PER_DIMENSION = 64
_DEFAULT_RUNS = 3
_MOST_ELEMENTS = 1 << 40
_MOST_CONCURRENCY = 1 << 16
_SECONDS = 1800
_ABOUT = (
    "Each optimisation of a TensorStore writer by itself, then together, as a configuration file has them. "
    "Parameters are converted to float32 and written one after the other."
)
_EXAMPLE = '[{"name": "baseline", "chunk_size_elements": 64, "concurrency_limit": 1, "compression": null}]'


def recognises(value: object) -> bool:
    """Return whether it is the configuration of a suite: whether it has one of its top-level keys."""
    return isinstance(value, dict) and any(key in value for key in _TOP)


def read(value: object, path: Path) -> Experiment:
    """Return the experiment that such a file describes.

    Whatever ``use_gpu`` says the state is on the CPU; if it is true, the experiment has a note that says so.

    Raises
    ------
    UsageError
        If it breaks a rule; the message names the file, the place in it and the key.
    """
    where = str(path)
    fields = Fields(value, "the configuration", where, _TOP)
    testing = Fields(
        fields.object("testing", {}, example='{"num_runs": 3}'), '"testing"', where, ("num_runs", "save_dir", "use_gpu")
    )
    arms = [*_arms(fields, "test_configurations"), *_custom_arms(fields)]
    if not arms:
        fields.refuse("has no configuration to run", remedy=f'write, for example, "test_configurations": {_EXAMPLE}')
    notes = _notes(testing)
    save_dir = testing.text("save_dir", None, example='"saved_models/tests/"')
    names = [arm.name for arm in arms]
    experiment = Experiment(
        name=path.stem,
        title=f"Isolated optimisations of {path.name}",
        about=_ABOUT,
        workload="checkpoint",
        design="arms",
        baseline=BASELINE if BASELINE in names else names[0],
        runs=testing.whole("num_runs", _DEFAULT_RUNS, most=MOST_RUNS, example=3),
        seed=0,
        control=True,
        limits=Limits(seconds=_SECONDS),
        arms=tuple(arms),
        settings=get_workload("checkpoint").settings({"save_dir": save_dir}, where),
        notes=notes,
    )
    return finished(experiment, where)


def _custom_arms(fields: Fields) -> list[PlannedArm]:
    given = fields.object("custom_tests", {}, example='{"enabled": false, "configurations": []}')
    custom = Fields(given, '"custom_tests"', fields.path, ("enabled", "configurations"))
    # What is switched off is read all the same: a slip in it should be heard of now, not when it is switched on.
    arms = _arms(custom, "configurations")
    return arms if custom.flag("enabled", False) else []


def _arms(fields: Fields, key: str) -> list[PlannedArm]:
    values = fields.list(key, [], example=_EXAMPLE)
    return [_arm(value, f"{key}[{index}]", fields.path) for index, value in enumerate(values)]


def _arm(value: object, where: str, path: str | None) -> PlannedArm:
    fields = Fields(value, where, path, ("name", "chunk_size_elements", "concurrency_limit", "compression"))
    name = checked_name(fields)
    fields.where = f"{where} ({name!r})"
    elements = fields.whole("chunk_size_elements", most=_MOST_ELEMENTS, example=262_144)
    concurrency = fields.whole("concurrency_limit", most=_MOST_CONCURRENCY, example=128)
    if "compression" not in fields.value:
        fields.refuse('lacks "compression"', remedy='write "compression": null, or "gzip"')
    per_dimension = elements == _PER_DIMENSION
    settings: dict[str, Any] = {
        "tool": "tensorstore",
        "zarr": 2,
        "chunk": str(_PER_DIMENSION) if per_dimension else elements,
        "chunking": "halving",
        "concurrency": concurrency,
        "compressor": fields.text("compression", None, example='null, or "gzip"'),
        "dtype": "float32",
        "in_flight": "one",
    }
    return PlannedArm(name, "arm", settings, slow=per_dimension)


def _notes(testing: Fields) -> tuple[str, ...]:
    if not testing.flag("use_gpu", False):
        return ()
    return ('"use_gpu" is true, but the bench saves from host memory: the state is on the CPU',)
