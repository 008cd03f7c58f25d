"""The configuration file of an isolated-optimisation suite; the structs are its schema.

Every configuration is an arm that writes one zarr 2 directory per parameter in float32, one after the other. Chunks of
64 elements are at most 64 along each dimension, as in such suites. Any other number is the elements of a chunk, reached
by halving the largest dimension. ``compression: null`` stores raw bytes; without a compressor, TensorStore would use
Blosc.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorkeep.bench.experiment.design import Text
from tensorkeep.bench.experiment.file import DEFAULT_SECONDS
from tensorkeep.bench.experiment.plan import MOST_RUNS, Plan, make_plan
from tensorkeep.bench.experiment.validation import convert
from tensorkeep.bench.experiment.workload import get_workload
from tensorkeep.bench.results import Arm, Experiment, Limits
from tensorkeep.errors import UsageError

BASELINE = "baseline"
"""Name of the configuration that the others are compared with; without one, the first is the baseline."""

_PER_DIMENSION = 64
_ABOUT = (
    "Each optimisation of a TensorStore writer by itself, then together, as a configuration file lists them. "
    "Parameters are converted to float32 and written one after the other."
)
_EXAMPLE = '[{"name": "baseline", "chunk_size_elements": 64, "concurrency_limit": 1, "compression": null}]'


class Testing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object ``testing``."""

    num_runs: Annotated[int, Meta(ge=1, le=MOST_RUNS)] = 3
    save_dir: Text | None = None
    use_gpu: bool = False


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration; ``compression`` is a compressor's name or null."""

    name: Text
    chunk_size_elements: Annotated[int, Meta(ge=1, le=1 << 40)]
    concurrency_limit: Annotated[int, Meta(ge=1, le=1 << 16)]
    compression: Text | None


class CustomTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object ``custom_tests``. Its configurations are validated even where it is not enabled."""

    enabled: bool = False
    configurations: tuple[Configuration, ...] = ()


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    testing: Testing = Testing()
    test_configurations: tuple[Configuration, ...] = ()
    custom_tests: CustomTests = CustomTests()


def recognises(value: object) -> bool:
    """Return whether JSON is the configuration of a suite: whether it has one of its fields."""
    return isinstance(value, dict) and any(field in value for field in Suite.__struct_fields__)


def read(value: object, path: Path) -> Plan:
    """Return the plan of such a file. The state is always on the CPU; if ``use_gpu`` is true, the plan has a note.

    Raises UsageError if it is not valid; the message names the file, the place in it and the field.
    """
    where = str(path)
    suite = convert(value, Suite, what="the configuration", path=where)
    testing, custom = suite.testing, suite.custom_tests
    configurations = [*suite.test_configurations, *(custom.configurations if custom.enabled else ())]
    if not configurations:
        remedy = f'write, for example, "test_configurations": {_EXAMPLE}'
        raise UsageError("the configuration has no test to run", path=where, remedy=remedy)
    names = [each.name for each in configurations]
    experiment = Experiment(
        name=path.stem,
        workload="checkpoint",
        title=f"Isolated optimisations of {path.name}",
        about=_ABOUT,
        baseline=BASELINE if BASELINE in names else names[0],
        runs=testing.num_runs,
        seed=0,
        control=True,
        limits=Limits(seconds=DEFAULT_SECONDS),
        settings=msgspec.to_builtins(get_workload("checkpoint").parse_settings({"save_dir": testing.save_dir}, where)),
    )
    note = '"use_gpu" is true, but the bench saves from host memory: the state is on the CPU'
    return make_plan(experiment, [_arm(each) for each in configurations], where, (note,) if testing.use_gpu else ())


def _arm(given: Configuration) -> Arm:
    per_dimension = given.chunk_size_elements == _PER_DIMENSION
    settings = {
        "tool": "tensorstore",
        "zarr": 2,
        "chunk": str(_PER_DIMENSION) if per_dimension else given.chunk_size_elements,
        "chunking": "halving",
        "concurrency": given.concurrency_limit,
        "compressor": given.compression,
        "dtype": "float32",
        "in_flight": "one",
    }
    return Arm(given.name, "arm", settings, slow=per_dimension)
