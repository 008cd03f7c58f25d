"""Experiments: read them by name or from a JSON file (arms, a design, or a suite), and plan their arms."""

import json
import os
import re
import shlex
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tensorkeep.errors import UsageError, did_you_mean
from tensorkeep_bench import design
from tensorkeep_bench.design import MOST_ARMS, Base, Change, Combination, Expansion, Level, Text
from tensorkeep_bench.results import Arm, Experiment, FileStem, Limits, Place, PlotName, Settings
from tensorkeep_bench.workload import convert, get_workload

DEFAULT_SECONDS = 1800
MOST_RUNS = 1000
MAX_FILE_BYTES = 1 << 20
_MOST_SECONDS = 7 * 24 * 3600
_LONGEST_NAME = 80
NAME_RULE = f"a name has up to {_LONGEST_NAME} printable characters without '/' and does not begin with '-' or '.'"

# A string, closed or not, or a comment; outside of strings, JSON has no slash. Possessive, to stay linear in time.
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*+"?|//[^\n]*', re.DOTALL)


class ExperimentPlan(msgspec.Struct, frozen=True):
    experiment: Experiment
    arms: tuple[Arm, ...]  # the baseline first, then the A/A control if there is one
    notes: tuple[str, ...] = ()  # remarks that the user sees before the run

    def with_design(
        self,
        *,
        runs: int | None = None,
        seed: int | None = None,
        limits: Limits | None = None,
        budget: int | None = None,
    ) -> "ExperimentPlan":
        """Return the plan with other values; None keeps a value. UsageError if ``runs`` is out of range."""
        if runs is not None and not 1 <= runs <= MOST_RUNS:
            raise UsageError(f"an experiment runs 1 to {MOST_RUNS} times, not {runs}", remedy="give, for example, 5")
        given = {"runs": runs, "seed": seed, "limits": limits, "budget": budget}
        changed = {name: value for name, value in given.items() if value is not None}
        return replace(self, experiment=replace(self.experiment, **changed))

    def with_settings(self, **settings: Any) -> "ExperimentPlan":
        """Return the plan with some workload settings replaced; UsageError if one is not valid."""
        workload = get_workload(self.experiment.workload)
        checked = workload.parse_settings({**self.experiment.settings, **settings})
        return replace(self, experiment=replace(self.experiment, settings=msgspec.to_builtins(checked)))

    def only(self, names: Collection[str]) -> "ExperimentPlan":
        """Return the plan with some of its arms and the baseline; UsageError if an arm does not exist."""
        known = [arm.name for arm in self.arms]
        for name in names:
            if name not in known:
                words_of = get_workload(self.experiment.workload).words
                # Of several arms with a technique, the first one counts.
                words = {word: arm.name for arm in reversed(self.arms) for word in words_of(arm.settings)}
                message = f"experiment {self.experiment.name!r} has no arm {name!r}"
                raise UsageError(message, remedy=did_you_mean(name, known, "its arms", aliases=words))
        kept = tuple(arm for arm in self.arms if arm.name in names or arm.role != "arm")
        if len(kept) == len(self.arms):
            return self
        # Some arms of a design are another design: steps and effects would compare other changes.
        # The control keeps its place, which lies outside a design.
        plain = tuple(arm if arm.role == "control" else replace(arm, places=(Place("arm"),)) for arm in kept)
        experiment = replace(self.experiment, design="arms", omitted=(), factors={}, aliases=())
        return replace(self, experiment=experiment, arms=plain)


def make_plan(experiment: Experiment, arms: Sequence[Arm], notes: tuple[str, ...] = ()) -> ExperimentPlan:
    """Return a plan with roles and the A/A control; UsageError if names, arms or the baseline are not valid."""
    names = [arm.name for arm in arms]
    if len(names) > MOST_ARMS:
        raise UsageError(f"has {len(names)} arms, more than {MOST_ARMS}", remedy="use fewer")
    # Names are keys of the results, where two equal names could not be separated.
    for place, name in enumerate(names):
        check_name(name, "arm")
        if name in names[:place]:
            raise UsageError(f"two arms are called {name!r}", remedy="give each arm its own name")
    base = str(experiment.baseline)
    _check_known(base, names, f"the baseline {experiment.baseline!r} is not an arm", "its arms")
    # The control runs as one more arm in every block, so it sees the same drift as the others.
    control = f"{base} (again)"
    if experiment.control and control in names:
        raise UsageError(f"{control!r} is the name of the A/A control", remedy="rename that arm")
    baseline = arms[names.index(base)]
    about = "The A/A control: the baseline measured again. How far it lies from the baseline is noise."
    again = replace(baseline, name=control, role="control", about=about, places=(Place("control"),))
    others = (replace(arm, role="arm") for arm in arms if arm is not baseline)
    controls = [again] if experiment.control else []
    return ExperimentPlan(experiment, (replace(baseline, role="baseline"), *controls, *others), notes)


def _check_known(name: str, known: Collection[str], message: str, what: str) -> None:
    if name not in known:
        raise UsageError(message, remedy=did_you_mean(name, known, what))


def check_name(name: str, what: str) -> None:
    if not is_name(name):
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        raise UsageError(f"{what} {shown!r} has an invalid name", remedy=NAME_RULE)


def is_name(text: str) -> bool:
    # Names appear in terminals, tables and options of the command line: a slash, a control character or a leading minus
    # would be read as something else.
    printable = text.isprintable() and "/" not in text and text == text.strip()
    return printable and 0 < len(text) <= _LONGEST_NAME and text[0] not in "-."


# Files with arms or a design


class FileLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: Annotated[int, Meta(ge=1, le=_MOST_SECONDS)] | None = DEFAULT_SECONDS
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None


class ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of every design; ``docs/reference/results.md`` explains them."""

    design: str = "arms"
    name: Text | None = None
    title: Text | None = None
    about: str = ""
    workload: Literal["checkpoint", "training"] = "checkpoint"
    baseline: Text | None = None
    runs: Annotated[int, Meta(ge=1, le=MOST_RUNS)] = 5
    seed: Annotated[int, Meta(ge=0)] = 0
    control: bool = True
    precision: Annotated[float, Meta(gt=1, le=10)] | None = None
    budget: Annotated[int, Meta(ge=1, le=_MOST_SECONDS)] | None = None
    limits: FileLimits = FileLimits()
    settings: Settings = {}
    figure_names: dict[PlotName, FileStem] = {}
    known_as: tuple[Text, ...] = ()  # words that an error about an unknown experiment understands

    @abstractmethod
    def expand(self) -> Expansion:
        """Return the arms of the design; UsageError if they are not valid."""


class NamedArm(Base, frozen=True, kw_only=True):
    name: Text


class ArmsFile(ExperimentFile, frozen=True, kw_only=True):
    arms: Annotated[tuple[NamedArm, ...], Meta(min_length=1)]

    def expand(self) -> Expansion:
        return Expansion([Arm(one.name, "arm", one.settings, one.about, slow=one.slow) for one in self.arms])


class ChangesDesignFile(ExperimentFile, frozen=True, kw_only=True):
    """The designs ``one-at-a-time``, ``leave-one-out`` and ``steps``."""

    base: Base
    changes: Annotated[tuple[Change, ...], Meta(min_length=1, max_length=MOST_ARMS)]

    def expand(self) -> Expansion:
        self.check_changes()
        return design.with_changes(self.design, self.base, self.changes)

    def check_changes(self) -> None:
        names = [change.name for change in self.changes]
        settings = {*self.base.settings, *(key for change in self.changes for key in change.sets)}
        for place, change in enumerate(self.changes):
            check_name(change.name, "change")
            what = f"change {change.name!r}"
            if not change.sets and not change.unsets:
                raise UsageError(f"{what} changes nothing", remedy='add a "set" or an "unset"')
            if change.name in names[:place]:
                raise UsageError(f"there are two changes {change.name!r}", remedy="rename one of them")
            others = [name for name in names if name != change.name]
            for need in change.needs:
                _check_known(need, others, f"{what} needs {need!r}, which is not another change", "changes")
            for key in change.unsets:
                _check_known(key, sorted(settings), f"{what} unsets {key!r}, which nothing sets", "settings")


class CombinationsFile(ChangesDesignFile, frozen=True, kw_only=True):
    combinations: Annotated[tuple[Combination, ...], Meta(min_length=1, max_length=MOST_ARMS)]

    def expand(self) -> Expansion:
        self.check_changes()
        names = [change.name for change in self.changes]
        for number, combination in enumerate(self.combinations, start=1):
            members = combination.changes
            for member in members:
                _check_known(member, names, f"combination {number} has no change {member!r}", "changes")
            if len(set(members)) < 2 or len(set(members)) != len(members):
                message = f"combination {number} does not have two or more different changes"
                raise UsageError(message, remedy='write, for example, "changes": ["one", "two"]')
        return design.combinations(self.base, self.changes, self.combinations)


class FactorsFile(ExperimentFile, frozen=True, kw_only=True):
    """A factor is a list of values of the setting with its name, or an object of levels by name."""

    base: Base
    factors: Annotated[dict[str, Any], Meta(min_length=1)]

    def expand(self) -> Expansion:
        factors = {name: _levels(name, value) for name, value in self.factors.items()}
        return (design.factorial if self.design == "factorial" else design.fractional)(self.base, factors)


# The fields that the experiment takes from its file as they are.
_COPIED = ("workload", "about", "runs", "seed", "control", "precision", "budget", "figure_names")
_FILES: dict[str, type[ExperimentFile]] = {
    "arms": ArmsFile,
    "one-at-a-time": ChangesDesignFile,
    "leave-one-out": ChangesDesignFile,
    "steps": ChangesDesignFile,
    "factorial": FactorsFile,
    "fractional": FactorsFile,
    "combinations": CombinationsFile,
}


def read_design(value: object, path: Path) -> ExperimentPlan:
    kind = value.get("design", "arms") if isinstance(value, dict) else "arms"
    if not isinstance(kind, str) or kind not in _FILES:
        remedy = did_you_mean(str(kind), _FILES, "designs")
        raise UsageError(f"the experiment has the unknown design {kind!r}", remedy=remedy)
    file = convert(value, _FILES[kind], what="the experiment")
    expansion = file.expand()
    settings = get_workload(file.workload).parse_settings(file.settings)
    name = file.name or path.stem
    experiment = Experiment(
        name=name,
        title=file.title or name,
        design=kind,
        baseline=file.baseline or expansion.arms[0].name,
        **{field: getattr(file, field) for field in _COPIED},
        limits=Limits(file.limits.seconds, file.limits.memory_bytes),
        factors=expansion.factors,
        aliases=expansion.aliases,
        omitted=tuple(expansion.omitted),
        settings=msgspec.to_builtins(settings),
    )
    return make_plan(experiment, expansion.arms)


_LEVELS_EXAMPLE = "write, for example, [1, 128]"


def _levels(factor: str, value: object) -> list[Change]:
    what = f"factor {factor!r}"
    if isinstance(value, list):
        levels = [Change(_label(level), {factor: level}) for level in value]
    elif isinstance(value, dict):
        levels = []
        for name, content in value.items():
            level = convert(content, Level, what=f"{what}, level {name!r}")
            levels.append(Change(name, **msgspec.structs.asdict(level)))
    else:
        raise UsageError(f"{what} is neither a list of values nor an object of levels", remedy=_LEVELS_EXAMPLE)
    labels = [level.name for level in levels]
    for label in labels:
        # Checked as a part of an arm's name, where a level may begin with a minus.
        if not label or not is_name(f"{factor}={label}"):
            remedy = f"write it as an object of levels by name; {NAME_RULE}"
            raise UsageError(f"{what} has the level {label!r}, which is not a valid name", remedy=remedy)
    if len(levels) < 2 or len(set(labels)) != len(labels):
        raise UsageError(f"{what} does not have two or more different levels", remedy=_LEVELS_EXAMPLE)
    return levels


def _label(level: object) -> str:
    return level if isinstance(level, str) else "none" if level is None else json.dumps(level)


# Configurations of an isolated-optimisation suite

# Name of the configuration that the others are compared with; without one, the first is the baseline.
BASELINE = "baseline"

_PER_DIMENSION = 64
# Arms with smaller chunks write tens of thousands of files per gigabyte, so they save the smaller state.
_SMALL_CHUNK = 16_384
_SUITE_ABOUT = (
    "Each optimisation of a TensorStore writer by itself, then together, as a configuration file lists them. "
    "Parameters are converted to float32 and written one after the other."
)
# The experiment with the same arms: a suite without a model has its states.
_SUITE_EXPERIMENT = "isolated"
# The state of the documents, 2.9 GB, and its first 5 parameters.
_LARGER = "--model openllama-3b:first-100:float16 --slow-model openllama-3b:first-5:float16"
_SUITE_EXAMPLE = '[{"name": "baseline", "chunk_size_elements": 64, "concurrency_limit": 1, "compression": null}]'


class Testing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_runs: Annotated[int, Meta(ge=1, le=MOST_RUNS)] = 3
    save_dir: Text | None = None
    use_gpu: bool = False
    model: Text | None = None
    slow_model: Text | None = None


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Text
    chunk_size_elements: Annotated[int, Meta(ge=1, le=1 << 40)]
    concurrency_limit: Annotated[int, Meta(ge=1, le=1 << 16)]
    compression: Text | None

    def arm(self) -> Arm:
        # In such suites, 64 elements mean chunks of at most 64 along each dimension. Any other number is the elements
        # of a chunk, reached by halving the largest dimension.
        per_dimension = self.chunk_size_elements == _PER_DIMENSION
        settings = {
            "tool": "tensorstore",
            "zarr": 2,
            "chunk": str(_PER_DIMENSION) if per_dimension else self.chunk_size_elements,
            "chunking": "halving",
            "concurrency": self.concurrency_limit,
            # Null stores raw bytes. Without the setting, TensorStore would use Blosc.
            "compressor": self.compression,
            # The suites convert parameters to float32 and write one after the other.
            "dtype": "float32",
            "in_flight": "one",
        }
        return Arm(self.name, "arm", settings, slow=per_dimension or self.chunk_size_elements < _SMALL_CHUNK)


class CustomTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = False
    configurations: tuple[Configuration, ...] = ()


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration file of an isolated-optimisation suite."""

    testing: Testing = Testing()
    test_configurations: tuple[Configuration, ...] = ()
    custom_tests: CustomTests = CustomTests()


def _is_suite(value: object) -> bool:
    # Any of its fields is enough, so that a suite with a typo gets the error of a suite.
    return isinstance(value, dict) and any(field in value for field in Suite.__struct_fields__)


def read_suite(value: object, path: Path) -> ExperimentPlan:
    suite = convert(value, Suite, what="the configuration")
    testing, custom = suite.testing, suite.custom_tests
    # Custom configurations are validated even where they are not enabled, so a typo shows at once.
    configurations = [*suite.test_configurations, *(custom.configurations if custom.enabled else ())]
    if not configurations:
        remedy = f'write, for example, "test_configurations": {_SUITE_EXAMPLE}'
        raise UsageError("the configuration has no test to run", remedy=remedy)
    names = [each.name for each in configurations]
    given = {name: model for name in ("model", "slow_model") if (model := getattr(testing, name)) is not None}
    isolated = convert(read_json(_find(_SUITE_EXPERIMENT)), ArmsFile, what="the experiment")
    settings = {**({} if testing.model else isolated.settings), **given, "save_dir": testing.save_dir}
    command = f"tensorkeep bench checkpoint --experiment {shlex.quote(str(path))}"
    larger = f"for the 2.9 GB of the documents: {command} {_LARGER}; for your own checkpoint: {command} --from PATH"
    notes = (
        ['"use_gpu" is true, but the bench saves from host memory: the state is on the CPU'] if testing.use_gpu else []
    )
    experiment = Experiment(
        name=path.stem,
        workload="checkpoint",
        title=f"Isolated optimisations of {path.name}",
        about=f"{_SUITE_ABOUT} A larger state, {larger}.",
        baseline=BASELINE if BASELINE in names else names[0],
        runs=testing.num_runs,
        seed=0,
        control=True,
        limits=Limits(seconds=DEFAULT_SECONDS),
        settings=msgspec.to_builtins(get_workload("checkpoint").parse_settings(settings)),
        figure_names=msgspec.to_builtins(isolated.figure_names),
    )
    return make_plan(experiment, [each.arm() for each in configurations], (*notes, larger))


# Finding and reading files


def shipped(workload: str | None = None) -> dict[str, str]:
    """Return the titles of the experiments that ship with Tensorkeep by name, or only those for a workload."""
    found = {path.stem: _shipped_file(path) for path in _shipped_files()}
    return {name: each["title"] for name, each in found.items() if workload in (None, each["workload"])}


def read_experiment(name_or_path: str | os.PathLike[str]) -> ExperimentPlan:
    """Return the plan of a shipped experiment or a JSON file; UsageError if missing or not valid."""
    path = _find(name_or_path)
    try:
        value = read_json(path)
        # A suite is recognised by its top-level names: it has no "design".
        plan = (read_suite if _is_suite(value) else read_design)(value, path)
        for arm in plan.arms:
            _check_arm(plan.experiment.workload, arm)
    except UsageError as error:
        # What is inside the file does not know its path.
        raise UsageError(error.message, path=path, remedy=error.remedy) from error
    return plan


def _check_arm(workload: str, arm: Arm) -> None:
    try:
        get_workload(workload).parse_arm(arm.settings)
    except UsageError as error:
        remedy = error.remedy or "correct the settings"
        raise UsageError(f"arm {arm.name!r}: {error.message}", remedy=remedy) from error


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    name = os.fspath(name_or_path)
    found = {path.stem: path for path in _shipped_files()}
    # A shipped name wins over a file of the same name; ``./name`` is always the file.
    if isinstance(name_or_path, str) and name in found:
        return found[name]
    path = Path(name)
    if path.suffix == ".json" or os.sep in name or path.is_file():
        return path
    words = {word: each for each, file in found.items() for word in _shipped_file(file).get("known_as", ())}
    remedy = f"{did_you_mean(name, found, 'experiments', aliases=words)} (or give the path of a JSON file)"
    raise UsageError(f"the experiment {name!r} does not exist", remedy=remedy)


def _shipped_files() -> list[Path]:
    return sorted(Path(str(files("tensorkeep_bench") / "experiments")).glob("*.json"))


def _shipped_file(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def read_json(path: Path) -> object:
    """Return the content of a JSON file with ``//`` comments; UsageError if it is too large or not valid JSON."""
    try:
        with path.open("rb") as opened:
            # One byte more than allowed: the size of a pipe or device is not known before reading.
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        remedy = "give the name of an experiment, or the path of a JSON file"
        raise UsageError(f"cannot read the experiment: {error.strerror}", remedy=remedy) from error
    if len(content) > MAX_FILE_BYTES:
        message = f"is larger than {MAX_FILE_BYTES:,} bytes, too large for an experiment"
        raise UsageError(message, remedy="give an experiment, not results")
    try:
        # Comments become blanks, so that the positions in error messages stay correct.
        commented = content.decode("utf-8-sig")
        text = _STRING_OR_COMMENT.sub(lambda m: " " * len(m[0]) if m[0].startswith("//") else m[0], commented)
        value: object = json.loads(text, object_pairs_hook=_unique_keys)
        # Half of a surrogate pair or an infinite number could not be written to the results.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        if path.suffix.lower() not in (".yaml", ".yml"):
            raise UsageError(f"is not JSON: {reason}", remedy="correct the file") from error
        source, target = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".json")))
        converted = "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"
        remedy = f'write it as JSON, with PyYAML: python -c "{converted}" < {source} > {target}'
        raise UsageError("is YAML; experiments are read from JSON", remedy=remedy) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    # json keeps the last of two equal keys silently; a pasted setting would be lost.
    if len(found) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r} appears twice in one object")
    return found
