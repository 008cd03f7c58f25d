"""Experiments: those that ship, files of users, the configuration of a suite, and the errors of each."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case
from tensorkeep_bench.analysis.samples import SMALLEST_STATE
from tensorkeep_bench.checkpoint import models
from tensorkeep_bench.checkpoint.tools import parse_tool
from tensorkeep_bench.checkpoint.workload import DEFAULT_MODEL
from tensorkeep_bench.experiment import ExperimentPlan, read_design, read_experiment, shipped
from tensorkeep_bench.results import Arm, Experiment, Limits, Place

Write = Callable[..., Path]
"""Writes an experiment's content to a file of a name, and returns its path."""

NAMES = ["claims", "factorial", "from-baseline-to-tensorkeep", "isolated", "peers", "six-way", "three-way"]

# With comments, as users write it.
COMMENTED = """{
  "testing": {"num_runs": 3},  // Change number of runs

  "test_configurations": [
    {
      "name": "my_custom_test",
      "chunk_size_elements": 16384,  // Modify chunk size
      "concurrency_limit": 64,        // Modify concurrency
      "compression": "gzip"           // null or "gzip"
    }
  ]
}
"""
SIX = [
    ("baseline", 64, 1, None),
    ("concurrency_128", 64, 128, None),
    ("chunks_1mb", 262144, 1, None),
    ("compression_gzip", 64, 1, "gzip"),
    ("concurrency_chunks", 262144, 128, None),
    ("t5x_full", 262144, 128, "gzip"),
]


def arm_of(plan: ExperimentPlan, name: str) -> Arm:
    return next(arm for arm in plan.arms if arm.name == name)


def configurations(*rows: tuple[object, ...]) -> list[dict[str, Any]]:
    keys = ("name", "chunk_size_elements", "concurrency_limit", "compression")
    return [dict(zip(keys, row, strict=True)) for row in rows]


def suite(**testing: Any) -> dict[str, Any]:
    given = {"num_runs": 3, "save_dir": "saved_models/phase4_tests/", "use_gpu": False, **testing}
    return {"testing": given, "test_configurations": configurations(*SIX)}


def mine(**changes: Any) -> dict[str, Any]:
    arms = [{"name": "one", "settings": {"tool": "torch"}}, {"name": "two", "settings": {"tool": "safetensors"}}]
    return {"arms": arms, **changes}


def stack(**changes: Any) -> dict[str, Any]:
    base = {"settings": {"tool": "tensorkeep", "compression": "none"}}
    small = {"name": "small", "set": {"compression": "lossless"}}
    return {"design": "steps", "base": base, "changes": [small], **changes}


def points(**changes: Any) -> dict[str, Any]:
    return {"design": "factorial", "base": {"settings": {"tool": "dcp"}}, "factors": {"threads": [1, 2]}, **changes}


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(content: object, name: str = "mine.json") -> Path:
        path = tmp_path / name
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


# Experiments that ship


@pytest.mark.parametrize("name", NAMES)
def test_shipped_experiment_is_listed_valid_and_complete(name: str) -> None:
    assert list(shipped("checkpoint")) == NAMES
    assert all(shipped().values())
    assert set(shipped()) > set(NAMES)
    planned = read_experiment(name)
    assert (planned.experiment.name, planned.experiment.title) == (name, shipped()[name])
    assert len(planned.experiment.about) > 80 and planned.experiment.control and planned.experiment.runs >= 3
    assert [arm.role for arm in planned.arms] == ["baseline", "control", *["arm"] * (len(planned.arms) - 2)]
    assert planned.arms[0].name == planned.experiment.baseline
    assert planned.arms[1].settings == planned.arms[0].settings
    if planned.experiment.design != "factorial":
        assert all(arm.about for arm in planned.arms)
    nbytes = models.parse(planned.experiment.settings["model"]).nbytes
    # A comparison is large enough for verdicts.
    assert (SMALLEST_STATE if name in ("peers", "three-way", "six-way", "isolated") else 0) <= nbytes < 5e8
    slow = planned.experiment.settings.get("slow_model") or planned.experiment.settings["model"]
    small_chunks = [arm for arm in planned.arms if arm.settings.get("chunk") == "64"]
    assert all(arm.slow for arm in small_chunks)
    assert not small_chunks or models.parse(slow).nbytes < 1e8, "chunks of 64 x 64 run at a few MB/s"


def described(name: str) -> dict[str, tuple[Any, ...]]:
    """Return chunk, concurrency and compressor of the TensorStore arms of an experiment."""
    found = {}
    for arm in read_experiment(name).arms:
        if arm.settings["tool"] == "tensorstore" and arm.role != "control":
            same = [arm.settings[key] for key in ("zarr", "dtype", "in_flight", "chunking")]
            assert same == [2, "float32", "one", "halving"]
            found[arm.name] = tuple(arm.settings[key] for key in ("chunk", "concurrency", "compressor"))
    return found


def test_three_way_and_six_way_match_their_documentation() -> None:
    names = [arm.name for arm in read_experiment("three-way").arms]
    assert names == ["pytorch", "pytorch (again)", "tensorstore", "t5x"]
    arms = {"tensorstore": ("64", None, "as-documented"), "t5x": ("64MiB", 128, "gzip")}
    assert described("three-way") == arms
    arms |= {"ts+concurrency": ("64", 128, None), "ts+chunks": (262144, 1, None), "ts+compression": ("64", 1, "gzip")}
    assert described("six-way") == arms
    assert read_experiment("six-way").experiment.baseline == "tensorstore"


def test_arms_of_claims_differ_in_one_setting() -> None:
    arms = {arm.name: arm.settings for arm in read_experiment("claims").arms}
    for name, expected in {
        "": {"compressor": "as-documented"},
        "-gzip": {"compressor": "gzip"},
        "-concurrency-1": {"concurrency": 1},
        "-concurrency-128": {"concurrency": 128},
        "-chunks": {"chunk": 262144},
        "-chunks-concurrency-1": {"chunk": 262144, "concurrency": 1},
        "-chunks-concurrency-128": {"chunk": 262144, "concurrency": 128},
        "-keep-dtype": {"dtype": "keep"},
        "-no-sync": {"compressor": "as-documented", "sync": False},
        "t5x": {"chunk": "64MiB", "concurrency": 128, "compressor": "gzip"},
    }.items():
        settings = arms[name if name == "t5x" else f"tensorstore{name}"]
        with case(name):
            assert dict(settings.items() - arms["tensorstore-raw"].items()) == expected


def test_every_step_to_tensorkeep_changes_one_setting() -> None:
    planned = read_experiment("from-baseline-to-tensorkeep")
    stairs = [arm for arm in planned.arms if arm.places[0].kind in ("base", "step")]
    names = "t5x +keep-dtype +raw +all-in-flight +zarr3 +crc32c +tensorkeep-format tensorkeep tensorkeep-lossless"
    assert [arm.name for arm in stairs] == names.split()
    assert stairs[0].settings == arm_of(read_experiment("three-way"), "t5x").settings
    for before, after in itertools.pairwise(stairs):
        old, new = before.settings, after.settings
        changed = {key for key in old | new if old.get(key) != new.get(key)}
        assert len(changed) == 1 or after.name == "+tensorkeep-format", after.name
    peers = read_experiment("peers")
    tools = {name: parse_tool(arm_of(peers, name).settings) for name in ("tensorkeep", "tensorkeep-lossless")}
    assert {arm.name: parse_tool(arm.settings) for arm in stairs[-2:]} == tools
    assert {omitted.place.kind for omitted in planned.experiment.omitted} == {"alone", "without"}


@pytest.mark.integration
def test_listing_experiments_imports_nothing_heavy() -> None:
    code = "import sys; from tensorkeep_bench.cli.measure import RunOptions, checkpoint; "
    code += "checkpoint(options=RunOptions(list_=True)); "
    code += "print({'torch', 'PIL', 'scipy', 'tensorstore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "six-way" in done.stdout and done.stdout.endswith("set()\n")


# The configuration of a suite


def test_suite_is_read_unchanged_and_isolated_has_its_arms(written: Write) -> None:
    planned = read_experiment(written(suite(), "phase4_config.json"))
    found = planned.experiment
    assert (found.name, found.runs, found.baseline) == ("phase4_config", 3, "baseline")
    assert found.settings["save_dir"] == "saved_models/phase4_tests/"
    [larger] = planned.notes
    assert f"--experiment {written(suite(), 'phase4_config.json')} --model openllama-3b:first-100" in larger
    assert larger in found.about
    note, _ = read_experiment(written(suite(use_gpu=True))).notes
    assert note == '"use_gpu" is true, but the bench saves from host memory: the state is on the CPU'
    assert [arm.name for arm in planned.arms if arm.role != "control"] == [name for name, *_ in SIX]
    settings = {"tool": "tensorstore", "zarr": 2, "dtype": "float32", "in_flight": "one", "chunking": "halving"}
    settings |= {"chunk": "64", "concurrency": 1, "compressor": None}
    assert arm_of(planned, "baseline").settings == settings
    full = arm_of(planned, "t5x_full")
    assert [full.settings[key] for key in ("chunk", "concurrency", "compressor")] == [262144, 128, "gzip"]
    slow = ["baseline", "baseline (again)", "concurrency_128", "compression_gzip"]
    assert [arm.name for arm in planned.arms if arm.slow] == slow
    # The shipped experiment has the same arms.
    isolated = read_experiment("isolated")
    arms = {arm.name: (arm.settings, arm.slow) for arm in planned.arms}
    assert ({arm.name: (arm.settings, arm.slow) for arm in isolated.arms}, isolated.experiment.runs) == (arms, 3)
    # Its states, too, which are large enough for verdicts, and its names of figures.
    assert found.settings == isolated.experiment.settings | {"save_dir": "saved_models/phase4_tests/"}
    assert found.figure_names == isolated.experiment.figure_names


def test_a_further_name_is_of_a_plot_that_exists(written: Write) -> None:
    arms = [{"name": name, "settings": {"tool": name}} for name in ("torch", "safetensors")]
    file = {"baseline": "torch", "arms": arms, "figure_names": {"gains": "my_gains"}}
    assert read_experiment(written(file)).experiment.figure_names == {"gains": "my_gains"}
    with pytest.raises(UsageError, match=r"'gain'.*figure_names"):
        read_experiment(written({**file, "figure_names": {"gain": "my_gains"}}))


def test_suite_names_its_states_and_small_chunks_save_the_smaller_one(written: Write) -> None:
    one, other = "openllama-3b:layers=2", "openllama-3b:layers=1"
    for given, model, slow_model in (
        ({"model": one}, one, None),
        ({"model": one, "slow_model": other}, one, other),
        ({"slow_model": other}, "openllama-3b:scale=0.04:float16", other),
    ):
        with case(given):
            settings = read_experiment(written(suite(**given))).experiment.settings
            assert (settings["model"], settings["slow_model"]) == (model, slow_model)
    with pytest.raises(UsageError, match="'gpt' is not a known model"):
        read_experiment(written(suite(model="gpt")))
    rows = [(f"of {size}", size, 1, None) for size in (1, 63, 65, 4096, 16_383, 16_384, 1 << 30)]
    planned = read_experiment(written({"test_configurations": configurations(*rows)}))
    assert [arm.name for arm in planned.arms if not arm.slow] == ["of 16384", "of 1073741824"]


def test_comments_are_ignored_and_slashes_in_strings_are_none(written: Write) -> None:
    planned = read_experiment(written(COMMENTED))
    assert planned.arms[0].name == planned.experiment.baseline == "my_custom_test"
    assert (planned.arms[0].settings["chunk"], planned.arms[0].slow) == (16384, False)
    about = 'see // "https://example.org" \\'
    assert read_experiment(written(mine(about=about))).experiment.about == about


def test_custom_tests(written: Write) -> None:
    two = configurations(("test_64_concurrency", 262144, 64, None), ("test_512kb_chunks", 131072, 128, "gzip"))
    custom = {"custom_tests": {"enabled": True, "configurations": two}}
    planned = read_experiment(written(custom))
    assert [arm.name for arm in planned.arms if arm.role == "arm"] == ["test_512kb_chunks"]
    assert planned.experiment.runs == 3
    both = {**suite(), **custom}
    assert len(read_experiment(written(both)).arms) == 6 + 1 + 2
    custom["custom_tests"]["enabled"] = False
    assert len(read_experiment(written(both)).arms) == 6 + 1
    two[0]["compresion"] = None
    with pytest.raises(UsageError, match="has no field 'compresion'"):
        read_experiment(written(both))


def change_first(lacks: str | None = None, **changes: Any) -> dict[str, Any]:
    content = suite()
    content["test_configurations"][0] |= changes
    content["test_configurations"][0].pop(lacks, None)
    return content


CORRECT = "correct the value"
NAME_RULE = "a name has up to 80 printable characters without '/' and does not begin with '-' or '.'"
FIRST = ": test_configurations[0] ('baseline')"


def each_of(prefix: str, *rows: tuple[object, str, str]) -> list[tuple[object, str, str]]:
    """Return rows of a content, a message that begins with a prefix, and the start of its remedy."""
    return [(content, f"{prefix}{message}", remedy) for content, message, remedy in rows]


OWN_NAMES = "give each arm its own name"
AS_OBJECT = "write it as an object of levels by name"
ERRORS = each_of(
    "the configuration",
    ({**suite(), "test_configs": []}, " has no field 'test_configs'", "did you mean 'test_configurations'?"),
    (suite(runs=3), ": testing has no field 'runs'", "did you mean 'num_runs'?"),
    (suite(num_runs=0), ": testing.num_runs: expected `int` >= 1", CORRECT),
    (suite(use_gpu="yes"), ": testing.use_gpu: expected `bool`, got `str`", CORRECT),
    (change_first(chunk_size=64), f"{FIRST} has no field 'chunk_size'", "did you mean 'chunk_size_elements'?"),
    (change_first("concurrency_limit"), f"{FIRST} lacks the field 'concurrency_limit'", "add 'concurrency_limit'"),
    (change_first("compression"), f"{FIRST} lacks the field 'compression'", "add 'compression'"),
    (change_first(chunk_size_elements=-64), f"{FIRST}.chunk_size_elements: expected `int` >= 1", CORRECT),
    (change_first(compression=False), f"{FIRST}.compression: expected `str | null`, got `bool`", CORRECT),
    ({"test_configurations": [7]}, ": test_configurations[0]: expected `object`, got `int`", CORRECT),
    ({"testing": {}}, " has no test to run", 'write, for example, "test_configurations": [{"name"'),
)
ERRORS += each_of(
    "",
    (change_first(name="t5x_full"), "two arms are called 't5x_full'", OWN_NAMES),
    (change_first(name="../up"), "arm '../up' has an invalid name", NAME_RULE),
    (change_first(name="up/down"), "arm 'up/down' has an invalid name", NAME_RULE),
)


# Files of users


def test_a_file_has_defaults_and_all_its_fields_are_used(written: Write) -> None:
    planned = read_experiment(written(mine(), "quick.json"))
    settings = dict.fromkeys(("slow_model", "from", "with_optimizer", "save_dir"))
    settings |= {"model": DEFAULT_MODEL, "into": False, "keep": False}
    protocol = {"runs": 5, "seed": 0, "control": True, "limits": Limits(seconds=1800)}
    expected = Experiment(name="quick", workload="checkpoint", title="quick", baseline="one", settings=settings)
    assert planned.experiment == msgspec.structs.replace(expected, **protocol)
    about = "The A/A control: the baseline measured again. How far it lies from the baseline is noise."
    assert planned.arms[:2] == (
        Arm("one", "baseline", {"tool": "torch"}),
        Arm("one (again)", "control", {"tool": "torch"}, about, (Place("control"),)),
    )
    given = {"settings": {"from": "x.pt", "into": True}, "limits": {"seconds": None, "memory_bytes": 5}}
    content = mine(title="T", about="A.", baseline="two", runs=2, seed=9, control=False, **given)
    planned = read_experiment(written(content))
    found = planned.experiment
    assert (found.title, found.about, found.runs, found.seed) == ("T", "A.", 2, 9)
    assert [(arm.name, arm.role) for arm in planned.arms] == [("two", "baseline"), ("one", "arm")]
    assert (found.limits.seconds, found.limits.memory_bytes) == (None, 5)
    assert (found.settings["from"], found.settings["model"], found.settings["into"]) == ("x.pt", None, True)


def test_file_of_every_design(written: Write) -> None:
    base = {"name": "plain", "settings": {"tool": "tensorkeep"}}
    changes = [{"name": "small", "set": {"compression": "lossless"}}, {"name": "slow", "set": {"direct_io": False}}]
    together = {"combinations": [{"changes": ["small", "slow"]}]}
    for kind in ("one-at-a-time", "leave-one-out", "steps", "combinations"):
        more = together if kind == "combinations" else {}
        planned = read_experiment(written({"design": kind, "base": base, "changes": changes, **more}))
        assert planned.experiment.baseline == "plain" and len(planned.arms) >= 4
    assert planned.arms[-1].name == "small + slow"
    writing = {"direct": {"set": {"direct_io": True}}, "cached": {"set": {"direct_io": False}, "slow": True}}
    factors = {"compression": ["none", "lossless"], "writing": writing}
    planned = read_experiment(written({"design": "factorial", "base": base, "factors": factors}))
    assert planned.experiment.factors == {"compression": ("none", "lossless"), "writing": ("direct", "cached")}
    assert [arm.slow for arm in planned.arms if arm.role == "arm"] == [True, False, True]
    planned = read_design(fraction(levels("abcdefg")), Path("mine.json"))
    assert len(planned.arms) == 17 and planned.experiment.aliases
    negative = read_design(points(factors={"level": [1, -1]}), Path("mine.json"))
    assert negative.arms[-1].name == "level=-1"


def changed(**change: Any) -> dict[str, Any]:
    """Return a stack whose only change is this."""
    return stack(changes=[{"name": "x", **change}])


def combined(*names: str) -> dict[str, Any]:
    return stack(design="combinations", combinations=[{"changes": names}])


def in_order(*names: str, optional: bool = False) -> dict[str, Any]:
    """Return a stack in which the change x needs y, which may be optional."""
    more = {"x": {"needs": ["y"]}, "y": {"optional": optional}}
    return stack(changes=[{"name": name, "set": {name: 1}, **more.get(name, {})} for name in names])


def levels(factors: str, count: int = 2) -> dict[str, list[int]]:
    """Return factors, each with a name of one letter, that have so many levels."""
    return {factor: [*range(count)] for factor in factors}


def fraction(factors: dict[str, Any]) -> dict[str, Any]:
    return points(design="fractional", factors=factors)


def factor(levels: object) -> dict[str, Any]:
    return points(factors={"threads": levels})


ERRORS += each_of(
    "the experiment",
    ([], ": expected `object`, got `array`", CORRECT),
    (mine(run=5), " has no field 'run'", "did you mean 'runs'?"),
    (mine(changes=[]), " has no field 'changes'", "its fields: design, name"),
    (mine(design="step"), " has the unknown design 'step'", "did you mean 'steps'?"),
    (mine(design=["steps"]), " has the unknown design ['steps']", "did you mean 'steps'?"),
    (mine(workload="checkpoints"), ": workload: invalid enum value 'checkpoints'", CORRECT),
    (mine(runs=0), ": runs: expected `int` >= 1", CORRECT),
    (mine(runs=1001), ": runs: expected `int` <= 1000", CORRECT),
    (mine(runs=True), ": runs: expected `int`, got `bool`", CORRECT),
    (mine(control=1), ": control: expected `bool`, got `int`", CORRECT),
    (mine(title=""), ": title: expected `str` of length >= 1", CORRECT),
    (mine(limits={"seconds": -1}), ": limits.seconds: expected `int` >= 1", CORRECT),
    (mine(limits={"memory": 1}), ": limits has no field 'memory'", "did you mean 'memory_bytes'?"),
    (mine(arms=[]), ": arms: expected `array` of length >= 1", CORRECT),
    (mine(arms=[{"name": "one"}]), ": arms[0] ('one') lacks the field 'settings'", "add 'settings'"),
    (mine(arms=[{"settings": {}}]), ": arms[0] lacks the field 'name'", "add 'name'"),
    (mine(arms=[{"name": "a", "setting": {}}]), ": arms[0] ('a') has no field 'setting'", "did you mean 'settings'?"),
    (changed(unset="compression"), ": changes[0] ('x').unset: expected `array`, got `str`", CORRECT),
    (stack(base={}), ": base lacks the field 'settings'", "add 'settings'"),
    (points(factors={}), ": factors: expected `object` of length >= 1", CORRECT),
)
WITHOUT_Y = {**in_order("x", "y", "z"), "design": "combinations", "combinations": [{"changes": ["x", "z"]}]}
BASELINE = {"name": "one (again)", "settings": {}}
OPTIMIZER = {"model": "openllama-3b:float16", "with_optimizer": "adamw"}
ERRORS += each_of(
    "",
    (mine(baseline="on"), "the baseline 'on' is not an arm", "did you mean 'one'?"),
    (mine(settings={"modell": "x"}), "settings has no field 'modell'", "did you mean 'model'?"),
    (mine(settings=OPTIMIZER), "settings combine AdamW with float16 weights", "give a model in bfloat16 or float32"),
    (mine(settings={"model": "m", "from": "x"}), 'settings have both "model" and "from"', "keep one of them"),
    (mine(arms=mine()["arms"] * 2), "two arms are called 'one'", OWN_NAMES),
    (mine(arms=[*mine()["arms"], BASELINE]), "'one (again)' is the name of the A/A control", "rename that arm"),
    (mine(arms=[{"name": f"a{i}", "settings": {}} for i in range(300)]), "has 300 arms, more than 256", "use fewer"),
    (mine(arms=[{"name": "a" * 81, "settings": {}}]), f"arm '{'a' * 80}...' has an invalid name", NAME_RULE),
    (changed(), "change 'x' changes nothing", 'add a "set" or an "unset"'),
    (stack(changes=stack()["changes"] * 2), "there are two changes 'small'", "rename one of them"),
    (changed(set={"a": 1}, needs=["y"]), "change 'x' needs 'y', which is not another change", "changes: "),
    (changed(unset=["tol"]), "change 'x' unsets 'tol', which nothing sets", "did you mean 'tool'?"),
    (changed(set={"compression": "none"}), "step 'x' has the settings of an earlier one", "remove it"),
    (in_order("x", "y"), "change 'x' comes before 'y', which it needs", "put 'y' before it"),
    (in_order("y", "x", optional=True), "change 'x' comes before 'y', which it needs", "put 'y' before it"),
    (changed(set={"a": 1}, optional=True), "all changes are optional", "leave at least one"),
    (combined("small", "smal"), "combination 1 has no change 'smal'", "did you mean 'small'?"),
    (WITHOUT_Y, "combination 'x + z' has 'x' without 'y', which it needs", "add 'y' to its changes"),
    (combined("small"), "combination 1 does not have two or more different changes", "write, for example"),
    (factor({"one": {"sets": {}}}), "factor 'threads', level 'one' has no field 'sets'", "did you mean 'set'?"),
    (factor({"one": {"set": {}}, "uno": {"set": {}}}), "the point threads=uno has the settings of another one", "give"),
    (points(factors=levels("ab", 20)), "the design has more than 256 arms", "use fewer changes or le"),
    (points(factors=levels("abcdef")), "a full factorial takes up to 5 factors, not 6", 'write "design": "fract'),
)
ERRORS += each_of(
    "a fractional design takes 6 to 15 factors, ",
    (fraction(levels("abcde")), "not 5", 'write "design": "factorial"'),
    (fraction(levels("abcdefghijklmnop")), "not 16", "use fewer factors"),
)
ERRORS += each_of(
    "factor 'threads' ",
    (fraction(levels("abcde") | {"threads": [0, 1, 2]}), "has 3 levels; in a fractional design each has two", "keep"),
    (factor([1]), "does not have two or more different levels", "write, for example, [1, 128]"),
    (factor([1, "a/b"]), "has the level 'a/b', which is not a valid name", f"{AS_OBJECT}; {NAME_RULE}"),
    (factor(2), "is neither a list of values nor an object of levels", "write, for example, [1, 128]"),
)


@pytest.mark.parametrize(("content", "message", "remedy_start"), ERRORS)
def test_invalid_file_is_refused(written: Write, content: object, message: str, remedy_start: str) -> None:
    path = written(content)
    with pytest.raises(UsageError) as caught:
        read_experiment(path)
    assert (caught.value.message, caught.value.path) == (message, str(path))
    assert caught.value.remedy.startswith(remedy_start)
    assert len(str(caught.value).splitlines()) == 2


def test_invalid_json_is_refused(written: Write) -> None:
    for text, message in (
        ("{", "is not JSON: Expecting property name enclosed in double quotes"),
        ('{"runs": 5, "runs": 6}', "is not JSON: the key 'runs' appears twice in one object"),
        ('{"runs": NaN}', "is not JSON: Out of range float values"),
        ('{"runs": 1e999}', "is not JSON: Out of range float values"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
        (b"\xff\xfe{}", "is not JSON: 'utf-8' codec can't decode"),
        ('{"name": "\\ud800"}', "is not JSON: 'utf-8' codec can't encode"),
        ('{"name": "' + '\\"' * 500_000, "is not JSON: Unterminated string"),
        (" " * (1 << 20) + "{}", "is larger than 1,048,576 bytes, too large for an experiment"),
    ):
        with case(text[:30]), pytest.raises(UsageError) as caught:
            read_experiment(written(text))
        assert caught.value.message.startswith(message) and caught.value.remedy


def test_workload_checks_the_settings_of_arms(written: Write) -> None:
    misspelt = {"tool": "dcp", "thread": 2}
    for content, message, remedy in (
        (mine(arms=[{"name": "one", "settings": misspelt}]), "arm 'one': tool 'dcp' has no", "did"),
        (stack(base={"settings": {"tool": "holdfasst"}}), "arm 'base': the tool 'holdfasst' does not exist", ""),
        (factor([1, 0]), "arm 'threads=0': tool 'dcp': threads: expected `int` >= 1", ""),
    ):
        path = written(content)
        read_design(content, path)
        with case(message), pytest.raises(UsageError) as caught:
            read_experiment(path)
        assert caught.value.message.startswith(message) and str(caught.value.remedy).startswith(remedy)
        assert caught.value.path == str(path)


# Finding an experiment, and changing one


def test_unknown_name_and_missing_path_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remedies = {"tree-way": "did you mean 'three-way'?", "zzz": f"experiments: {', '.join(shipped())}"}
    for name, remedy in remedies.items():
        with pytest.raises(UsageError, match=f"the experiment '{name}' does not exist") as caught:
            read_experiment(name)
        assert caught.value.remedy == f"{remedy} (or give the path of a JSON file)"
    for path in (tmp_path / "no.json", str(tmp_path / "no.json"), tmp_path):
        with pytest.raises(UsageError, match="cannot read the experiment: ") as caught:
            read_experiment(path)
        assert caught.value.path == str(path)


def test_name_takes_precedence_over_file_but_not_over_path(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written(mine(), "three-way").parent)
    for source, first in (("three-way", "pytorch"), (f".{os.sep}three-way", "one"), (Path("three-way"), "one")):
        assert read_experiment(source).arms[0].name == first, source


def test_changed_copies_and_copies_of_only_some_arms() -> None:
    planned = read_experiment("six-way")
    before = planned.experiment
    for change in ({"runs": 7}, {"seed": 3}, {"limits": Limits(seconds=5)}):
        assert planned.with_design(**change).experiment == msgspec.structs.replace(before, **change)
    changed = planned.with_settings(slow_model="openllama-3b:layers=1").experiment.settings
    assert changed == {**before.settings, "slow_model": "openllama-3b:layers=1"}
    stored = planned.with_settings(**{"from": "some.ckpt", "model": None}).experiment.settings
    assert (stored["from"], stored["model"]) == ("some.ckpt", None)
    assert planned.experiment == before
    for runs in (0, 1001):
        with pytest.raises(UsageError, match=f"an experiment runs 1 to 1000 times, not {runs}"):
            planned.with_design(runs=runs)
    with pytest.raises(UsageError, match="settings has no field 'mode'"):
        planned.with_settings(mode="x")
    some = planned.only(["t5x", "ts+chunks"])
    assert [arm.name for arm in some.arms] == ["tensorstore", "tensorstore (again)", "t5x", "ts+chunks"]
    with pytest.raises(UsageError, match="experiment 'six-way' has no arm 'ts-chunks'") as caught:
        planned.only(["ts-chunks"])
    assert caught.value.remedy == "did you mean 'ts+chunks'?"
    # Some arms of a design are plain arms.
    planned = read_experiment("from-baseline-to-tensorkeep")
    assert planned.only([arm.name for arm in planned.arms]) is planned
    some = planned.only(["+raw", "tensorkeep"])
    assert (some.experiment.design, some.experiment.omitted) == ("arms", ())
    assert [arm.places[0].kind for arm in some.arms] == ["arm", "control", "arm", "arm"]
