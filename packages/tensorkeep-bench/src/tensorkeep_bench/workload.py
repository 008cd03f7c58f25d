"""The contract of a workload, the ``WORKLOAD`` of ``tensorkeep_bench.NAME.workload``: typed settings, and cells."""

import importlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import msgspec
from msgspec.inspect import ListType, StructType, Type, UnionType, VarTupleType, type_info

from tensorkeep.errors import TensorkeepError, UsageError, did_you_mean
from tensorkeep.ext import prepared
from tensorkeep_bench.results import Measure, Settings, Status, Subject

T = TypeVar("T")
SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)
# The runner handles settings as JSON objects; only the workload gives them types.
ArmT = TypeVar("ArmT")

_PATH_STEP = re.compile(r"\.([^.\[`]+)|\[(\d+)\]")
_FIELD_ERROR = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`")


class GateError(TensorkeepError):
    """A cell gave a wrong result, so that its speed does not count."""

    kind = "gate"


class DoesNotApplyError(TensorkeepError):
    """An arm cannot run on this machine, or with its subject."""


class Task(msgspec.Struct, frozen=True):
    """The task of a cell's process, sent as JSON."""

    workload: str
    arm: str
    settings: Settings  # the settings of the arm
    input: Settings  # what `Workload.prepare` returned for this arm
    measures: list[str]  # names of the measures to take
    directory: str  # where the cell may write; empty at the start, removed at the end
    block: int = 0
    baseline: Settings | None = None  # settings of the baseline, if this is a cell of another arm


class Outcome(msgspec.Struct):
    """The outcome of a cell and its figures; ``docs/reference/results.md`` describes each field."""

    status: Status = "ok"
    reason: str | None = None  # None if the status is ``"ok"``
    seconds: float = 0.0  # wall clock of the process
    figures: dict[str, float] = {}  # by measure, in its unit
    clocks: dict[str, float] = {}  # seconds of the stages that no figure contains
    observed: dict[str, str] = {}  # technique -> what showed that it was active
    turns: dict[str, tuple[tuple[float, float], ...]] = {}  # measure -> (this cell, baseline) in each turn
    losses: tuple[tuple[int, float], ...] = ()  # of training: (step, mean loss of the steps since the point before)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            # Added up, because a stage such as a warm-up occurs several times in one cell.
            self.clocks[name] = self.clocks.get(name, 0.0) + time.perf_counter() - begin


class PreparedInput(NamedTuple):
    input: msgspec.Struct  # `Task.input` of the cells
    subject: Subject


PreparedInputs = tuple[PreparedInput, PreparedInput]  # for normal arms, and for arms that are marked slow


class Workload(ABC, Generic[SettingsT, ArmT]):
    """One kind of work that the bench measures; ``measures`` are in the order of the tables.

    ``SettingsT`` types the settings of an experiment, which all arms share. ``ArmT`` types the settings of one arm.
    """

    name: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]

    @abstractmethod
    def parse_settings(self, given: Mapping[str, object]) -> SettingsT:
        """Return an experiment's settings, with defaults for those that its file or the command line does not give.

        Raises UsageError if a setting is unknown, of another type, or out of range.
        """

    @abstractmethod
    def parse_arm(self, given: Mapping[str, object]) -> ArmT:
        """Return the settings of an arm; UsageError if a setting is unknown, of another type, or out of range."""

    @abstractmethod
    def missing(self, arm: ArmT) -> str | None:
        """Return why an arm cannot run on this machine, such as a package that is not installed, or None."""

    @abstractmethod
    def prepare(self, settings: SettingsT, arms: Collection[ArmT], scratch: Path) -> PreparedInputs:
        """Create the subject of all cells in a folder that the runner removes after the run.

        Raises StoreError if disk or memory do not suffice for all the arms that will run.
        """

    @abstractmethod
    def measures_of(self, settings: SettingsT) -> list[str]:
        """Return the names of the measures that an experiment with these settings takes."""

    @abstractmethod
    def use(self, settings: Settings, arm: Settings) -> str:
        """Return the command or the call by which a user does what an arm does."""

    def words(self, arm: Settings) -> Collection[str]:
        """Return other words for what an arm does, which errors about an unknown arm understand."""
        return ()

    @abstractmethod
    def measure(self, task: Task) -> Outcome:
        """Run one cell, in the process that was started for it."""


def get_workload(name: str) -> Workload[Any, Any]:
    # Imported by name: the module of a workload imports torch, which listing and reading experiments must not.
    return cast("Workload[Any, Any]", importlib.import_module(f"tensorkeep_bench.{name}.workload").WORKLOAD)


def convert(value: object, kind: type[T], *, what: str) -> T:
    """Return the value of a JSON file as an instance of a struct type; messages call it ``what``.

    Raises UsageError if the value does not have that type. The message names the place of the error and the field.

    Examples
    --------
    >>> class Point(msgspec.Struct):
    ...     x: int
    >>> convert({"x": 3}, Point, what="the point")
    Point(x=3)
    """
    try:
        return msgspec.convert(value, prepared(kind))
    except msgspec.ValidationError as error:
        message, remedy = _explain(str(error), value, kind, what)
        raise UsageError(message, remedy=remedy) from error


def _explain(problem: str, value: Any, kind: type[Any], what: str) -> tuple[str, str]:
    # msgspec reports the place only in the text of the message: ``... - at `$.arms[0].settings` ``.
    problem, _, path = problem.partition(" - at `$")
    info, place = type_info(kind), ""
    for step in _PATH_STEP.finditer(path):
        info, value, place = _child(info, step[1]), value[step[1] or int(step[2])], place + step[0]
        # A name is easier to find in a long list than a number.
        if step[2] and isinstance(value, dict) and isinstance(value.get("name"), str):
            place += f" ({value['name']!r})"
    where = f"{what}: {place.removeprefix('.')}" if place else what
    field = _FIELD_ERROR.fullmatch(problem)
    if field is None:
        return f"{where}: {problem[:1].lower()}{problem[1:]}", "correct the value"
    if "unknown" in problem:
        known = [each.encode_name for end in _kinds(info) if isinstance(end, StructType) for each in end.fields]
        return f"{where} has no field {field[1]!r}", did_you_mean(field[1], known, "its fields")
    return f"{where} lacks the field {field[1]!r}", f"add {field[1]!r}"


def _kinds(info: Type) -> tuple[Type, ...]:
    # A field that may be null is a union; its error lies in the type that is not null.
    return info.types if isinstance(info, UnionType) else (info,)


def _child(info: Type, field: str | None) -> Type:
    """Return the type of a field, or of the items of a list without one."""
    for kind in _kinds(info):
        if isinstance(kind, StructType):
            return next(each.type for each in kind.fields if each.encode_name == field)
        if isinstance(kind, ListType | VarTupleType):
            return kind.item_type
    return info
