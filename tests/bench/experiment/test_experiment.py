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

from tensorkeep.bench.analysis.verdicts import SMALLEST_STATE
from tensorkeep.bench.checkpoint import models
from tensorkeep.bench.checkpoint.tools.registry import parse_tool
from tensorkeep.bench.checkpoint.workload import DEFAULT_MODEL
from tensorkeep.bench.experiment.library import read_experiment, shipped
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.results import Arm, Experiment, Limits, Place
from tensorkeep.errors import UsageError

Write = Callable[..., Path]
"""Writes an experiment's content to a file of a name, and returns its path."""

NAMES = ["claims", "factorial", "from-baseline-to-tensorkeep", "isolated", "peers", "six-way", "three-way"]

# With comments, as users write it.
COMMENTED = """{
  "testing": {
    "num_runs": 3,  // Change number of runs
    "save_dir": "saved_models/phase4_tests/"
  },

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
CUSTOM = """{
  "custom_tests": {
    "enabled": true,
    "configurations": [
      {
        "name": "test_64_concurrency",
        "chunk_size_elements": 262144,
        "concurrency_limit": 64,
        "compression": null
      },
      {
        "name": "test_512kb_chunks",
        "chunk_size_elements": 131072,
        "concurrency_limit": 128,
        "compression": "gzip"
      }
    ]
  }
}
"""


def arm_of(plan: Plan, name: str) -> Arm:
    return next(arm for arm in plan.arms if arm.name == name)


def suite(configurations: Any = SIX, **testing: Any) -> dict[str, Any]:
    keys = ("name", "chunk_size_elements", "concurrency_limit", "compression")
    return {
        "testing": {"num_runs": 3, "save_dir": "saved_models/phase4_tests/", "use_gpu": False, **testing},
        "test_configurations": [dict(zip(keys, values, strict=True)) for values in configurations],
    }


def mine(**changes: Any) -> dict[str, Any]:
    arms = [{"name": "one", "settings": {"tool": "torch"}}, {"name": "two", "settings": {"tool": "safetensors"}}]
    return {"arms": arms, **changes}


def stack(**changes: Any) -> dict[str, Any]:
    content = {
        "design": "steps",
        "base": {"settings": {"tool": "tensorkeep", "compression": "none"}},
        "changes": [{"name": "small", "set": {"compression": "lossless"}}],
    }
    return {**content, **changes}


def points(**changes: Any) -> dict[str, Any]:
    content = {"design": "factorial", "base": {"settings": {"tool": "dcp"}}, "factors": {"threads": [1, 2]}}
    return {**content, **changes}


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(content: object, name: str = "mine.json") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


# Experiments that ship


def test_shipped_experiments_are_listed() -> None:
    assert list(shipped("checkpoint")) == NAMES
    assert all(shipped().values())
    assert set(shipped()) > set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_experiment_is_valid_and_complete(name: str) -> None:
    planned = read_experiment(name)
    assert (planned.experiment.name, planned.experiment.title) == (name, shipped()[name])
    assert len(planned.experiment.about) > 80
    assert planned.experiment.control
    assert planned.experiment.runs >= 3
    roles = [arm.role for arm in planned.arms]
    assert roles[:2] == ["baseline", "control"]
    assert set(roles[2:]) == {"arm"}
    assert planned.arms[0].name == planned.experiment.baseline
    assert planned.arms[1].settings == planned.arms[0].settings
    if planned.experiment.design != "factorial":
        assert all(arm.about for arm in planned.arms)
    nbytes = models.parse(planned.experiment.settings["model"]).nbytes
    assert nbytes < 5e8
    slow = planned.experiment.settings.get("slow_model") or planned.experiment.settings["model"]
    many_files = any(arm.settings.get("chunk") == "64" for arm in planned.arms)
    assert not many_files or models.parse(slow).nbytes < 1e8, "chunks of 64 x 64 run at a few MB/s"


@pytest.mark.parametrize("name", ["peers", "three-way", "six-way", "isolated"])
def test_shipped_comparisons_are_large_enough_for_verdicts(name: str) -> None:
    assert models.parse(read_experiment(name).experiment.settings["model"]).nbytes >= SMALLEST_STATE


@pytest.mark.parametrize("name", NAMES)
def test_arms_with_small_chunks_are_marked_slow(name: str) -> None:
    for arm in read_experiment(name).arms:
        assert arm.slow or arm.settings.get("chunk") != "64"


def described(name: str) -> dict[str, tuple[Any, ...]]:
    """Return chunk, concurrency and compressor of the TensorStore arms of an experiment."""
    found = {}
    for arm in read_experiment(name).arms:
        if arm.settings["tool"] == "tensorstore" and arm.role != "control":
            keys = ("zarr", "dtype", "in_flight", "chunking")
            assert [arm.settings[key] for key in keys] == [2, "float32", "one", "halving"] or name == "claims"
            found[arm.name] = tuple(arm.settings[key] for key in ("chunk", "concurrency", "compressor"))
    return found


def test_three_way_matches_its_documentation() -> None:
    assert [arm.name for arm in read_experiment("three-way").arms] == [
        "pytorch",
        "pytorch (again)",
        "tensorstore",
        "t5x",
    ]
    assert described("three-way") == {"tensorstore": ("64", None, "as-documented"), "t5x": ("64MiB", 128, "gzip")}


def test_six_way_matches_its_documentation() -> None:
    assert described("six-way") == {
        "tensorstore": ("64", None, "as-documented"),
        "t5x": ("64MiB", 128, "gzip"),
        "ts+concurrency": ("64", 128, None),
        "ts+chunks": (262144, 1, None),
        "ts+compression": ("64", 1, "gzip"),
    }
    assert read_experiment("six-way").experiment.baseline == "tensorstore"


def test_isolated_has_the_arms_of_the_suite(written: Write) -> None:
    shipped_arms = {arm.name: (arm.settings, arm.slow) for arm in read_experiment("isolated").arms}
    suite_arms = {arm.name: (arm.settings, arm.slow) for arm in read_experiment(written(suite())).arms}
    assert shipped_arms == suite_arms
    assert read_experiment("isolated").experiment.runs == 3


def test_arms_of_claims_differ_in_one_setting() -> None:
    arms = {arm.name: arm.settings for arm in read_experiment("claims").arms}
    raw = arms["tensorstore-raw"]

    def difference(name, other=raw):
        return {key: value for key, value in arms[name].items() if other.get(key, "absent") != value}

    assert difference("tensorstore") == {"compressor": "as-documented"}
    assert difference("tensorstore-gzip") == {"compressor": "gzip"}
    assert difference("tensorstore-concurrency-1") == {"concurrency": 1}
    assert difference("tensorstore-concurrency-128") == {"concurrency": 128}
    assert difference("tensorstore-chunks") == {"chunk": 262144}
    assert difference("tensorstore-chunks-concurrency-1") == {"chunk": 262144, "concurrency": 1}
    assert difference("tensorstore-chunks-concurrency-128") == {"chunk": 262144, "concurrency": 128}
    assert difference("tensorstore-keep-dtype") == {"dtype": "keep"}
    assert difference("tensorstore-no-sync", arms["tensorstore"]) == {"sync": False}
    assert difference("t5x") == {"chunk": "64MiB", "concurrency": 128, "compressor": "gzip"}


def test_every_step_to_tensorkeep_changes_one_setting() -> None:
    planned = read_experiment("from-baseline-to-tensorkeep")
    stairs = [arm for arm in planned.arms if arm.places[0].kind in ("base", "step")]
    assert [arm.name for arm in stairs] == [
        "t5x",
        "+keep-dtype",
        "+raw",
        "+all-in-flight",
        "+zarr3",
        "+crc32c",
        "+tensorkeep-format",
        "tensorkeep",
        "tensorkeep-lossless",
    ]
    assert stairs[0].settings == arm_of(read_experiment("three-way"), "t5x").settings
    for before, after in itertools.pairwise(stairs):
        changed = {
            key for key in before.settings | after.settings if before.settings.get(key) != after.settings.get(key)
        }
        assert len(changed) == 1 or after.name == "+tensorkeep-format", after.name
    peers = read_experiment("peers")
    tools = {name: parse_tool(arm_of(peers, name).settings) for name in ("tensorkeep", "tensorkeep-lossless")}
    assert {arm.name: parse_tool(arm.settings) for arm in stairs[-2:]} == tools
    assert {omitted.place.kind for omitted in planned.experiment.omitted} == {"alone", "without"}


def test_listing_experiments_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tensorkeep.bench.experiment.library import read_experiment, shipped; shipped(); "
        "read_experiment('peers'); "
        "print(sorted({'torch', 'matplotlib', 'scipy', 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The configuration of a suite


def test_suite_is_read_unchanged(written: Write) -> None:
    planned = read_experiment(written(suite(), "phase4_config.json"))
    found = planned.experiment
    assert (found.name, found.runs, found.baseline) == ("phase4_config", 3, "baseline")
    assert found.settings["save_dir"] == "saved_models/phase4_tests/"
    assert (found.settings["model"], planned.notes) == (DEFAULT_MODEL, ())
    assert [arm.name for arm in planned.arms if arm.role != "control"] == [name for name, *_ in SIX]
    assert arm_of(planned, "baseline").settings == {
        "tool": "tensorstore",
        "zarr": 2,
        "chunk": "64",
        "chunking": "halving",
        "concurrency": 1,
        "compressor": None,
        "dtype": "float32",
        "in_flight": "one",
    }
    full = arm_of(planned, "t5x_full")
    assert [full.settings[key] for key in ("chunk", "concurrency", "compressor")] == [262144, 128, "gzip"]
    assert [arm.name for arm in planned.arms if arm.slow] == [
        "baseline",
        "baseline (again)",
        "concurrency_128",
        "compression_gzip",
    ]


def test_comments_are_ignored(written: Write) -> None:
    planned = read_experiment(written(COMMENTED))
    assert planned.arms[0].name == planned.experiment.baseline == "my_custom_test"
    assert planned.arms[0].settings["chunk"] == 16384
    assert not planned.arms[0].slow


def test_slashes_in_strings_are_not_comments(written: Write) -> None:
    planned = read_experiment(written(mine(about='see // "https://example.org" \\')))
    assert planned.experiment.about == 'see // "https://example.org" \\'


def test_custom_tests(written: Write) -> None:
    planned = read_experiment(written(CUSTOM))
    assert [arm.name for arm in planned.arms if arm.role == "arm"] == ["test_512kb_chunks"]
    assert planned.experiment.runs == 3
    both = {**suite(), **json.loads(CUSTOM)}
    assert len(read_experiment(written(both)).arms) == 6 + 1 + 2
    both["custom_tests"]["enabled"] = False
    assert len(read_experiment(written(both)).arms) == 6 + 1
    both["custom_tests"]["configurations"][0]["compresion"] = None
    with pytest.raises(UsageError, match="has no field 'compresion'"):
        read_experiment(written(both))


def test_use_gpu_adds_a_note(written: Write) -> None:
    [note] = read_experiment(written(suite(use_gpu=True))).notes
    assert note == '"use_gpu" is true, but the bench saves from host memory: the state is on the CPU'
    assert read_experiment(written(suite(use_gpu=False))).notes == ()


def change_first(**changes: Any) -> dict[str, Any]:
    content = suite()
    content["test_configurations"][0] |= changes
    return content


def without(content: dict[str, Any], key: str) -> dict[str, Any]:
    del content["test_configurations"][0][key]
    return content


CORRECT = "correct the value"
NAME_RULE = "a name has up to 80 printable characters without '/' and does not begin with '-' or '.'"
FIRST = "the configuration: test_configurations[0] ('baseline')"

SUITE_ERRORS = [
    (
        {**suite(), "test_configuration": []},
        "the configuration has no field 'test_configuration'",
        "did you mean 'test_configurations'?",
    ),
    (suite(runs=3), "the configuration: testing has no field 'runs'", "did you mean 'num_runs'?"),
    (suite(num_runs=0), "the configuration: testing.num_runs: expected `int` >= 1", CORRECT),
    (suite(use_gpu="yes"), "the configuration: testing.use_gpu: expected `bool`, got `str`", CORRECT),
    (suite(save_dir=5), "the configuration: testing.save_dir: expected `str | null`, got `int`", CORRECT),
    (change_first(chunk_size=64), f"{FIRST} has no field 'chunk_size'", "did you mean 'chunk_size_elements'?"),
    (
        without(suite(), "concurrency_limit"),
        f"{FIRST} lacks the field 'concurrency_limit'",
        "add 'concurrency_limit'",
    ),
    (without(suite(), "compression"), f"{FIRST} lacks the field 'compression'", "add 'compression'"),
    (change_first(chunk_size_elements=-64), f"{FIRST}.chunk_size_elements: expected `int` >= 1", CORRECT),
    (change_first(concurrency_limit="128"), f"{FIRST}.concurrency_limit: expected `int`, got `str`", CORRECT),
    (change_first(compression=False), f"{FIRST}.compression: expected `str | null`, got `bool`", CORRECT),
    (change_first(name="t5x_full"), "two arms are called 't5x_full'", "give each arm its own name"),
    (change_first(name="../up"), "arm '../up' has an invalid name", NAME_RULE),
    (change_first(name="up/down"), "arm 'up/down' has an invalid name", NAME_RULE),
    (
        {"testing": {}, "test_configurations": [7]},
        "the configuration: test_configurations[0]: expected `object`, got `int`",
        CORRECT,
    ),
    (
        {"testing": {}},
        "the configuration has no test to run",
        'write, for example, "test_configurations": [{"name"',
    ),
]


# Files of users


def test_file_with_all_defaults(written: Write) -> None:
    planned = read_experiment(written(mine(), "quick.json"))
    settings = {
        "model": DEFAULT_MODEL,
        "slow_model": None,
        "from": None,
        "with_optimizer": None,
        "into": False,
        "save_dir": None,
    }
    assert planned.experiment == Experiment(
        name="quick",
        workload="checkpoint",
        title="quick",
        baseline="one",
        runs=5,
        seed=0,
        control=True,
        limits=Limits(seconds=1800),
        settings=settings,
    )
    about = "The A/A control: the baseline measured again. How far it lies from the baseline is noise."
    assert planned.arms[:2] == (
        Arm("one", "baseline", {"tool": "torch"}),
        Arm("one (again)", "control", {"tool": "torch"}, about, (Place("control"),)),
    )


def test_all_fields_of_a_file_are_used(written: Write) -> None:
    content = mine(
        title="T", about="A.", baseline="two", runs=2, seed=9, control=False, settings={"from": "x.pt", "into": True}
    )
    planned = read_experiment(written({**content, "limits": {"seconds": None, "memory_bytes": 5}}))
    found = planned.experiment
    assert (found.title, found.about, found.runs, found.seed) == ("T", "A.", 2, 9)
    assert [(arm.name, arm.role) for arm in planned.arms] == [("two", "baseline"), ("one", "arm")]
    assert (found.limits.seconds, found.limits.memory_bytes) == (None, 5)
    assert (found.settings["from"], found.settings["model"], found.settings["into"]) == ("x.pt", None, True)


def test_file_of_every_design(written: Write) -> None:
    base = {"name": "plain", "settings": {"tool": "tensorkeep"}}
    changes = [{"name": "small", "set": {"compression": "lossless"}}, {"name": "slow", "set": {"direct_io": False}}]
    for kind in ("one-at-a-time", "leave-one-out", "steps"):
        planned = read_experiment(written({"design": kind, "base": base, "changes": changes}))
        assert planned.experiment.baseline == "plain"
        assert len(planned.arms) >= 4
    together = {"combinations": [{"changes": ["small", "slow"]}]}
    planned = read_experiment(written({"design": "combinations", "base": base, "changes": changes, **together}))
    assert planned.arms[-1].name == "small + slow"
    factors = {
        "compression": ["none", "lossless"],
        "writing": {"direct": {"set": {"direct_io": True}}, "cached": {"set": {"direct_io": False}, "slow": True}},
    }
    planned = read_experiment(written({"design": "factorial", "base": base, "factors": factors}))
    assert planned.experiment.factors == {"compression": ("none", "lossless"), "writing": ("direct", "cached")}
    assert [arm.slow for arm in planned.arms if arm.role == "arm"] == [True, False, True]
    factors = {f"f{index}": [0, 1] for index in range(7)}
    content = {"design": "fractional", "base": base, "factors": factors}
    planned = read_experiment(written(content), check_arms=False)
    assert len(planned.arms) == 17
    assert planned.experiment.aliases


def test_level_can_be_negative(written: Write) -> None:
    planned = read_experiment(written(points(factors={"level": [1, -1]})), check_arms=False)
    assert planned.arms[-1].name == "level=-1"


ERRORS = [
    ([], "the experiment: expected `object`, got `array`", CORRECT),
    (mine(run=5), "the experiment has no field 'run'", "did you mean 'runs'?"),
    (mine(changes=[]), "the experiment has no field 'changes'", "its fields: design, name"),
    (mine(design="step"), "the experiment has the unknown design 'step'", "did you mean 'steps'?"),
    (mine(design=["steps"]), "the experiment has the unknown design ['steps']", "did you mean 'steps'?"),
    (mine(workload="checkpoints"), "the experiment: workload: invalid enum value 'checkpoints'", CORRECT),
    (mine(runs=0), "the experiment: runs: expected `int` >= 1", CORRECT),
    (mine(runs=1001), "the experiment: runs: expected `int` <= 1000", CORRECT),
    (mine(runs=True), "the experiment: runs: expected `int`, got `bool`", CORRECT),
    (mine(seed=1.5), "the experiment: seed: expected `int`, got `float`", CORRECT),
    (mine(control=1), "the experiment: control: expected `bool`, got `int`", CORRECT),
    (mine(title=""), "the experiment: title: expected `str` of length >= 1", CORRECT),
    (mine(baseline="on"), "the baseline 'on' is not an arm", "did you mean 'one'?"),
    (mine(limits={"seconds": -1}), "the experiment: limits.seconds: expected `int` >= 1", CORRECT),
    (mine(limits={"memory": 1}), "the experiment: limits has no field 'memory'", "did you mean 'memory_bytes'?"),
    (mine(settings={"modell": "x"}), "settings has no field 'modell'", "did you mean 'model'?"),
    (
        mine(settings={"model": "openllama-3b:float16", "with_optimizer": "adamw"}),
        "settings combine AdamW with float16 weights",
        "give a model in bfloat16 or float32",
    ),
    (
        mine(settings={"model": "openllama-3b", "from": "x"}),
        'settings have both "model" and "from"',
        "keep one of them",
    ),
    (mine(arms=[]), "the experiment: arms: expected `array` of length >= 1", CORRECT),
    (mine(arms=[{"name": "one"}]), "the experiment: arms[0] ('one') lacks the field 'settings'", "add 'settings'"),
    (mine(arms=[{"settings": {}}]), "the experiment: arms[0] lacks the field 'name'", "add 'name'"),
    (
        mine(arms=[{"name": "one", "setting": {}}]),
        "the experiment: arms[0] ('one') has no field 'setting'",
        "did you mean 'settings'?",
    ),
    (mine(arms=mine()["arms"] * 2), "two arms are called 'one'", "give each arm its own name"),
    (
        mine(arms=[*mine()["arms"], {"name": "one (again)", "settings": {}}]),
        "'one (again)' is the name of the A/A control",
        "rename that arm",
    ),
    (mine(arms=[{"name": f"a{i}", "settings": {}} for i in range(300)]), "has 300 arms, more than 256", "use fewer"),
    (mine(arms=[{"name": "a" * 81, "settings": {}}]), f"arm '{'a' * 80}...' has an invalid name", NAME_RULE),
    (stack(changes=[{"name": "x"}]), "change 'x' changes nothing", 'add a "set" or an "unset"'),
    (stack(changes=stack()["changes"] * 2), "there are two changes 'small'", "rename one of them"),
    (
        stack(changes=[{"name": "x", "set": {"a": 1}, "needs": ["y"]}]),
        "change 'x' needs 'y', which is not another change",
        "changes: ",
    ),
    (
        stack(changes=[{"name": "x", "unset": ["compresion"]}]),
        "change 'x' unsets 'compresion', which nothing sets",
        "did you mean 'compression'?",
    ),
    (
        stack(changes=[{"name": "x", "unset": "compression"}]),
        "the experiment: changes[0] ('x').unset: expected `array`, got `str`",
        CORRECT,
    ),
    (
        stack(changes=[{"name": "x", "set": {"compression": "none"}}]),
        "step 'x' has the settings of an earlier one",
        "remove it",
    ),
    (stack(base={}), "the experiment: base lacks the field 'settings'", "add 'settings'"),
    (
        stack(design="combinations", combinations=[{"changes": ["small", "smal"]}]),
        "combination 1 has no change 'smal'",
        "did you mean 'small'?",
    ),
    (
        stack(design="combinations", combinations=[{"changes": ["small"]}]),
        "combination 1 does not have two or more different changes",
        "write, for example",
    ),
    (points(factors={}), "the experiment: factors: expected `object` of length >= 1", CORRECT),
    (
        points(factors={"threads": [1]}),
        "factor 'threads' does not have two or more different levels",
        "write, for example, [1, 128]",
    ),
    (
        points(factors={"threads": [1, "a/b"]}),
        "factor 'threads' has the level 'a/b', which is not a valid name",
        f"write it as an object of levels by name; {NAME_RULE}",
    ),
    (
        points(factors={"threads": 2}),
        "factor 'threads' is neither a list of values nor an object of levels",
        "write, for example, [1, 128]",
    ),
    (
        points(factors={"threads": {"one": {"sets": {}}}}),
        "factor 'threads', level 'one' has no field 'sets'",
        "did you mean 'set'?",
    ),
    (
        points(factors={f"f{i}": [0, 1] for i in range(6)}),
        "a full factorial takes up to 5 factors, not 6",
        'write "design": "fractional"',
    ),
]


@pytest.mark.parametrize(("content", "message", "remedy_start"), [*SUITE_ERRORS, *ERRORS])
def test_invalid_file_is_refused(written: Write, content: object, message: str, remedy_start: str) -> None:
    path = written(content)
    with pytest.raises(UsageError) as caught:
        read_experiment(path)
    assert caught.value.message == message
    assert caught.value.path == str(path)
    assert caught.value.remedy.startswith(remedy_start)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes"),
        ('{"runs": 5, "runs": 6}', "is not JSON: the key 'runs' appears twice in one object"),
        ('{"runs": NaN}', "is not JSON: Out of range float values"),
        ('{"runs": 1e999}', "is not JSON: Out of range float values"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
        ('{"name": "\\ud800"}', "is not JSON: 'utf-8' codec can't encode"),
        ('{"name": "' + '\\"' * 500_000, "is not JSON: Unterminated string"),
        (" " * (1 << 20) + "{}", "is larger than 1,048,576 bytes, too large for an experiment"),
    ],
)
def test_invalid_json_is_refused(written: Write, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_experiment(written(text))
    assert caught.value.message.startswith(message)
    assert caught.value.remedy


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="is not JSON: 'utf-8' codec can't decode"):
        read_experiment(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("content", "message", "remedy"),
    [
        (
            mine(arms=[{"name": "one", "settings": {"tool": "dcp", "thread": 2}}]),
            "arm 'one': tool 'dcp' has no field 'thread'",
            "did you mean 'threads'?",
        ),
        (stack(base={"settings": {"tool": "holdfasst"}}), "arm 'base': the tool 'holdfasst' does not exist", None),
        (points(factors={"threads": [1, 0]}), "arm 'threads=0': tool 'dcp': threads: expected `int` >= 1", None),
    ],
)
def test_workload_checks_the_settings_of_arms(
    written: Write, content: object, message: str, remedy: str | None
) -> None:
    path = written(content)
    read_experiment(path, check_arms=False)
    with pytest.raises(UsageError) as caught:
        read_experiment(path)
    assert caught.value.message.startswith(message)
    assert caught.value.path == str(path)
    assert remedy is None or caught.value.remedy == remedy


# Finding an experiment, and changing one


def test_unknown_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_experiment("tree-way")
    assert caught.value.message == "the experiment 'tree-way' does not exist"
    assert caught.value.remedy == "did you mean 'three-way'? (or give the path of a JSON file)"
    with pytest.raises(UsageError) as caught:
        read_experiment("zzz")
    assert caught.value.remedy == f"experiments: {', '.join(shipped())} (or give the path of a JSON file)"


def test_missing_path_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.json", str(tmp_path / "no.json"), tmp_path):
        with pytest.raises(UsageError, match="cannot read the experiment: ") as caught:
            read_experiment(path)
        assert caught.value.path == str(path)


def test_name_takes_precedence_over_file_but_not_over_path(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(mine(), "three-way")
    monkeypatch.chdir(path.parent)
    assert read_experiment("three-way").arms[0].name == "pytorch"
    assert read_experiment(f".{os.sep}three-way").arms[0].name == "one"
    assert read_experiment(Path("three-way")).arms[0].name == "one"


def test_changed_copies() -> None:
    planned = read_experiment("six-way")
    before = planned.experiment
    assert planned.with_design(runs=7).experiment.runs == 7
    assert planned.with_design(seed=3).experiment == msgspec.structs.replace(before, seed=3)
    limits = Limits(seconds=5)
    assert planned.with_design(limits=limits).experiment.limits == limits
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


def test_only_some_arms() -> None:
    planned = read_experiment("six-way")
    some = planned.only(["t5x", "ts+chunks"])
    assert [arm.name for arm in some.arms] == ["tensorstore", "tensorstore (again)", "t5x", "ts+chunks"]
    with pytest.raises(UsageError, match="experiment 'six-way' has no arm 'ts-chunks'") as caught:
        planned.only(["ts-chunks"])
    assert caught.value.remedy == "did you mean 'ts+chunks'?"


def test_some_arms_of_a_design_are_plain_arms() -> None:
    planned = read_experiment("from-baseline-to-tensorkeep")
    assert planned.only([arm.name for arm in planned.arms]) is planned
    some = planned.only(["+raw", "tensorkeep"])
    assert (some.experiment.design, some.experiment.omitted) == ("arms", ())
    assert [arm.places[0].kind for arm in some.arms] == ["arm", "control", "arm", "arm"]
