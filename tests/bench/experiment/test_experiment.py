"""Experiments: the shipped ones, files of one's own, the configuration of a suite, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorkeep.bench.checkpoint import models
from tensorkeep.bench.checkpoint.tools.known import make
from tensorkeep.bench.checkpoint.workload import DEFAULT_MODEL
from tensorkeep.bench.experiment.experiment import read_experiment, shipped
from tensorkeep.errors import UsageError

NAMES = ["claims", "factorial", "from-baseline-to-tensorkeep", "isolated", "peers", "six-way", "three-way"]

# As people write it, comments included.
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


def suite(configurations=SIX, **testing) -> dict:
    keys = ("name", "chunk_size_elements", "concurrency_limit", "compression")
    return {
        "testing": {"num_runs": 3, "save_dir": "saved_models/phase4_tests/", "use_gpu": False, **testing},
        "test_configurations": [dict(zip(keys, values, strict=True)) for values in configurations],
    }


def mine(**changes) -> dict:
    arms = [{"name": "one", "settings": {"tool": "torch"}}, {"name": "two", "settings": {"tool": "safetensors"}}]
    return {"arms": arms, **changes}


def stack(**changes) -> dict:
    content = {
        "design": "steps",
        "base": {"settings": {"tool": "tensorkeep", "compression": "none"}},
        "changes": [{"name": "small", "set": {"compression": "lossless"}}],
    }
    return {**content, **changes}


def points(**changes) -> dict:
    content = {"design": "factorial", "base": {"settings": {"tool": "dcp"}}, "factors": {"threads": [1, 2]}}
    return {**content, **changes}


@pytest.fixture
def written(tmp_path):
    def write(content, name="mine.json") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


# What comes with Tensorkeep


def test_the_experiments_that_come_with_tensorkeep():
    assert list(shipped("checkpoint")) == NAMES
    assert all(shipped().values())
    assert set(shipped()) > set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_experiment_reads_and_is_complete(name):
    planned = read_experiment(name, check_settings=make)
    assert (planned.name, planned.title) == (name, shipped()[name])
    assert len(planned.about) > 80
    assert planned.control
    assert planned.runs >= 3
    roles = [arm.role for arm in planned.arms]
    assert roles[:2] == ["baseline", "control"]
    assert set(roles[2:]) == {"arm"}
    assert planned.arms[0].name == planned.baseline
    assert planned.arms[1].settings == planned.arms[0].settings
    if planned.design != "factorial":
        assert all(arm.about for arm in planned.arms)
    nbytes = models.parse(planned.settings["model"]).nbytes
    assert nbytes < 5e8
    many_files = any(arm.settings.get("chunk") == "64" for arm in planned.arms)
    assert not many_files or nbytes < 1e8, "chunks of 64 x 64 run at a few MB/s"


@pytest.mark.parametrize("name", NAMES)
def test_small_chunks_are_marked_slow(name):
    for arm in read_experiment(name).arms:
        assert arm.slow or arm.settings.get("chunk") != "64"


def described(name: str) -> dict[str, tuple]:
    """Return chunk, concurrency and compressor of the TensorStore arms of an experiment."""
    found = {}
    for arm in read_experiment(name).arms:
        if arm.settings["tool"] == "tensorstore" and arm.role != "control":
            keys = ("zarr", "dtype", "in_flight", "chunking")
            assert [arm.settings[key] for key in keys] == [2, "float32", "one", "halving"] or name == "claims"
            found[arm.name] = tuple(arm.settings[key] for key in ("chunk", "concurrency", "compressor"))
    return found


def test_three_way_is_as_documented():
    assert [arm.name for arm in read_experiment("three-way").arms] == [
        "pytorch",
        "pytorch (again)",
        "tensorstore",
        "t5x",
    ]
    assert described("three-way") == {"tensorstore": ("64", None, "as-documented"), "t5x": ("64MiB", 128, "gzip")}


def test_six_way_is_as_documented():
    assert described("six-way") == {
        "tensorstore": ("64", None, "as-documented"),
        "t5x": ("64MiB", 128, "gzip"),
        "ts+concurrency": ("64", 128, None),
        "ts+chunks": (262144, 1, None),
        "ts+compression": ("64", 1, "gzip"),
    }
    assert read_experiment("six-way").baseline == "tensorstore"


def test_isolated_is_the_suite(written):
    shipped_arms = {arm.name: (arm.settings, arm.slow) for arm in read_experiment("isolated").arms}
    suite_arms = {arm.name: (arm.settings, arm.slow) for arm in read_experiment(written(suite())).arms}
    assert shipped_arms == suite_arms
    assert read_experiment("isolated").runs == 3


def test_claims_has_arms_that_differ_in_one_thing():
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


def test_every_step_to_tensorkeep_changes_one_thing():
    planned = read_experiment("from-baseline-to-tensorkeep")
    stairs = [arm for arm in planned.arms if arm.place["kind"] in ("base", "step")]
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
    assert stairs[0].settings == read_experiment("three-way").arm("t5x").settings
    for before, after in itertools.pairwise(stairs):
        changed = {
            key for key in before.settings | after.settings if before.settings.get(key) != after.settings.get(key)
        }
        assert len(changed) == 1 or after.name == "+tensorkeep-format", after.name
    tools = {name: make(read_experiment("peers").arm(name).settings) for name in ("tensorkeep", "tensorkeep-lossless")}
    assert {arm.name: make(arm.settings) for arm in stairs[-2:]} == tools
    assert {entry["place"]["kind"] for entry in planned.omitted} == {"alone", "without"}


def test_listing_experiments_imports_nothing_heavy():
    code = (
        "import sys; from tensorkeep.bench.experiment.experiment import read_experiment, shipped; shipped(); "
        "read_experiment('peers'); "
        "print(sorted({'torch', 'matplotlib', 'scipy', 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The configuration of a suite


def test_a_suite_runs_as_it_is(written):
    planned = read_experiment(written(suite(), "phase4_config.json"), check_settings=make)
    assert (planned.name, planned.runs, planned.baseline) == ("phase4_config", 3, "baseline")
    assert planned.settings["save_dir"] == "saved_models/phase4_tests/"
    assert (planned.settings["model"], planned.notes) == (DEFAULT_MODEL, ())
    assert [arm.name for arm in planned.arms if arm.role != "control"] == [name for name, *_ in SIX]
    assert planned.arm("baseline").settings == {
        "tool": "tensorstore",
        "zarr": 2,
        "chunk": "64",
        "chunking": "halving",
        "concurrency": 1,
        "compressor": None,
        "dtype": "float32",
        "in_flight": "one",
    }
    full = planned.arm("t5x_full")
    assert [full.settings[key] for key in ("chunk", "concurrency", "compressor")] == [262144, 128, "gzip"]
    assert [arm.name for arm in planned.arms if arm.slow] == [
        "baseline",
        "baseline (again)",
        "concurrency_128",
        "compression_gzip",
    ]


def test_comments_are_passed_over(written):
    planned = read_experiment(written(COMMENTED), check_settings=make)
    assert planned.arms[0].name == planned.baseline == "my_custom_test"
    assert planned.arms[0].settings["chunk"] == 16384
    assert not planned.arms[0].slow


def test_slashes_in_texts_are_no_comments(written):
    planned = read_experiment(written(mine(about='see // "https://example.org" \\')))
    assert planned.about == 'see // "https://example.org" \\'


def test_custom_tests(written):
    planned = read_experiment(written(CUSTOM), check_settings=make)
    assert [arm.name for arm in planned.arms if arm.role == "arm"] == ["test_512kb_chunks"]
    assert planned.runs == 3
    both = {**suite(), **json.loads(CUSTOM)}
    assert len(read_experiment(written(both)).arms) == 6 + 1 + 2
    both["custom_tests"]["enabled"] = False
    assert len(read_experiment(written(both)).arms) == 6 + 1
    both["custom_tests"]["configurations"][0]["compresion"] = None
    with pytest.raises(UsageError, match='has no key "compresion"'):
        read_experiment(written(both))


def test_use_gpu_is_answered_with_a_note(written):
    [note] = read_experiment(written(suite(use_gpu=True))).notes
    assert note == '"use_gpu" is true, but the bench saves from host memory: the state is on the CPU'
    assert read_experiment(written(suite(use_gpu=False))).notes == ()


def change_first(**changes) -> dict:
    content = suite()
    content["test_configurations"][0] |= changes
    return content


def without(content: dict, key: str) -> dict:
    del content["test_configurations"][0][key]
    return content


SUITE_ERRORS = [
    (
        {**suite(), "test_configuration": []},
        'the configuration has no key "test_configuration"',
        "did you mean 'test_configurations'?",
    ),
    (suite(runs=3), '"testing" has no key "runs"', "did you mean 'num_runs'?"),
    (
        suite(num_runs=0),
        '"testing" has "num_runs": 0; it must be a whole number from 1 to 1000',
        'write, for example, "num_runs": 3',
    ),
    (
        suite(use_gpu="yes"),
        '"testing" has "use_gpu": "yes"; it must be true or false',
        'write, for example, "use_gpu": true',
    ),
    (
        suite(save_dir=5),
        '"testing" has "save_dir": 5; it must be a text or null',
        'write, for example, "save_dir": "saved_models/tests/"',
    ),
    (
        change_first(chunk_size=64),
        'test_configurations[0] has no key "chunk_size"',
        "did you mean 'chunk_size_elements'?",
    ),
    (
        without(suite(), "concurrency_limit"),
        "test_configurations[0] ('baseline') lacks \"concurrency_limit\", a whole number from 1 to 65536",
        'write, for example, "concurrency_limit": 128',
    ),
    (
        without(suite(), "compression"),
        "test_configurations[0] ('baseline') lacks \"compression\"",
        'write "compression": null, or "gzip"',
    ),
    (
        change_first(chunk_size_elements=-64),
        "test_configurations[0] ('baseline') has \"chunk_size_elements\": -64; it must be a whole number from 1 to "
        "1099511627776",
        'write, for example, "chunk_size_elements": 262144',
    ),
    (
        change_first(concurrency_limit="128"),
        'test_configurations[0] (\'baseline\') has "concurrency_limit": "128"; it must be a whole number from 1 to '
        "65536",
        'write, for example, "concurrency_limit": 128',
    ),
    (
        change_first(compression=False),
        "test_configurations[0] ('baseline') has \"compression\": false; it must be a text or null",
        'write, for example, "compression": null, or "gzip"',
    ),
    (change_first(name="t5x_full"), "two arms are called 't5x_full'", "give each a name of its own"),
    (
        change_first(name="../up"),
        'test_configurations[0] has the name "../up"',
        "a name is up to 80 printable characters without '/', the first no '-' or '.'",
    ),
    (
        change_first(name="up/down"),
        'test_configurations[0] has the name "up/down"',
        "a name is up to 80 printable characters without '/', the first no '-' or '.'",
    ),
    (
        {"testing": {}, "test_configurations": [7]},
        "test_configurations[0] must be an object, not 7",
        "its keys: name, chunk_size_elements, concurrency_limit, compression",
    ),
]


@pytest.mark.parametrize(
    ("content", "message", "remedy_start"),
    [
        *SUITE_ERRORS,
        (
            {"testing": {}},
            "the configuration has no configuration to run",
            'write, for example, "test_configurations": [{"name"',
        ),
    ],
)
def test_what_is_refused_in_a_suite(written, content, message, remedy_start):
    path = written(content)
    with pytest.raises(UsageError) as caught:
        read_experiment(path)
    assert caught.value.message == message
    assert caught.value.path == str(path)
    assert caught.value.remedy.startswith(remedy_start)


# Files of one's own


def test_a_file_of_ours_with_all_defaults(written):
    planned = read_experiment(written(mine(), "quick.json"), check_settings=make)
    assert planned.as_dict() == {
        "name": "quick",
        "title": "quick",
        "about": "",
        "workload": "checkpoint",
        "design": "arms",
        "baseline": "one",
        "runs": 5,
        "seed": 0,
        "control": True,
        "limits": {"seconds": 1800, "memory_bytes": None},
        "factors": {},
        "aliases": [],
        "omitted": [],
        "settings": {
            "model": DEFAULT_MODEL,
            "slow_model": None,
            "from": None,
            "with_optimizer": None,
            "into": False,
            "save_dir": None,
        },
    }
    assert [arm.as_dict() for arm in planned.arms][:2] == [
        {
            "name": "one",
            "role": "baseline",
            "settings": {"tool": "torch"},
            "about": "",
            "places": [{"kind": "arm"}],
            "slow": False,
        },
        {
            "name": "one (again)",
            "role": "control",
            "settings": {"tool": "torch"},
            "about": "The baseline again, as an A/A control: any difference is noise.",
            "places": [{"kind": "control"}],
            "slow": False,
        },
    ]


def test_what_a_file_says_is_what_is_planned(written):
    content = mine(
        title="T", about="A.", baseline="two", runs=2, seed=9, control=False, settings={"from": "x.pt", "into": True}
    )
    planned = read_experiment(written({**content, "limits": {"seconds": None, "memory_bytes": 5}}))
    assert (planned.title, planned.about, planned.runs, planned.seed) == ("T", "A.", 2, 9)
    assert [(arm.name, arm.role) for arm in planned.arms] == [("two", "baseline"), ("one", "arm")]
    assert (planned.limits.seconds, planned.limits.memory_bytes) == (None, 5)
    assert (planned.settings["from"], planned.settings["model"], planned.settings["into"]) == ("x.pt", None, True)


def test_every_design_can_be_written_down(written):
    base = {"name": "plain", "settings": {"tool": "tensorkeep"}}
    changes = [{"name": "small", "set": {"compression": "lossless"}}, {"name": "slow", "set": {"direct_io": False}}]
    for kind in ("one-at-a-time", "leave-one-out", "steps"):
        planned = read_experiment(written({"design": kind, "base": base, "changes": changes}), check_settings=make)
        assert planned.baseline == "plain"
        assert len(planned.arms) >= 4
    together = {"combinations": [{"changes": ["small", "slow"]}]}
    planned = read_experiment(written({"design": "combinations", "base": base, "changes": changes, **together}))
    assert planned.arms[-1].name == "small + slow"
    factors = {
        "compression": ["none", "lossless"],
        "writing": {"direct": {"set": {"direct_io": True}}, "cached": {"set": {"direct_io": False}, "slow": True}},
    }
    planned = read_experiment(written({"design": "factorial", "base": base, "factors": factors}), check_settings=make)
    assert planned.factors == {"compression": ["none", "lossless"], "writing": ["direct", "cached"]}
    assert [arm.slow for arm in planned.arms if arm.role == "arm"] == [True, False, True]
    factors = {f"f{index}": [0, 1] for index in range(7)}
    planned = read_experiment(written({"design": "fractional", "base": base, "factors": factors}))
    assert len(planned.arms) == 17
    assert planned.aliases
    assert planned.as_dict()["aliases"] == planned.aliases


def test_a_level_may_be_negative(written):
    planned = read_experiment(written(points(factors={"level": [1, -1]})))
    assert planned.arms[-1].name == "level=-1"


ERRORS = [
    ([], "the experiment must be an object, not []", "its keys: name, title"),
    (mine(run=5), 'the experiment has no key "run"', "did you mean 'runs'?"),
    (mine(changes=[]), "an experiment of the design 'arms' has no key \"changes\"", "its keys: name, title"),
    (mine(design="step"), 'the experiment has no known design: "step"', "did you mean 'steps'?"),
    (mine(workload="checkpoints"), 'the experiment has no known workload: "checkpoints"', "did you mean 'checkpoint'?"),
    (
        mine(runs=0),
        'the experiment has "runs": 0; it must be a whole number from 1 to 1000',
        'write, for example, "runs": 5',
    ),
    (
        mine(runs=True),
        'the experiment has "runs": true; it must be a whole number from 1 to 1000',
        'write, for example, "runs": 5',
    ),
    (
        mine(seed=1.5),
        'the experiment has "seed": 1.5; it must be a whole number from 0 to 9223372036854775807',
        'write, for example, "seed": 0',
    ),
    (
        mine(control=1),
        'the experiment has "control": 1; it must be true or false',
        'write, for example, "control": true',
    ),
    (
        mine(title=""),
        'the experiment has "title": ""; it must be a text',
        'write, for example, "title": "My comparison"',
    ),
    (mine(baseline="on"), "the baseline 'on' is no arm", "did you mean 'one'?"),
    (
        mine(limits={"seconds": -1}),
        'limits has "seconds": -1; it must be a whole number from 1 to 604800 or null',
        'write, for example, "seconds": 600',
    ),
    (mine(limits={"memory": 1}), 'limits has no key "memory"', "did you mean 'memory_bytes'?"),
    (mine(settings={"modell": "x"}), 'settings has no key "modell"', "did you mean 'model'?"),
    (
        mine(settings={"model": "openllama-3b:float16", "with_optimizer": "adamw"}),
        "settings asks for AdamW of float16 weights",
        "give a model in bfloat16 or float32",
    ),
    (mine(settings={"model": "openllama-3b", "from": "x"}), 'settings has both "model" and "from"', "keep one of them"),
    (
        mine(arms=[]),
        'the experiment has "arms": []; it must be a list that is not empty',
        'write, for example, "arms": [{"name"',
    ),
    (
        mine(arms=[{"name": "one"}]),
        "arm 'one' lacks \"settings\", an object",
        'write, for example, "settings": {"tool": "torch"}',
    ),
    (mine(arms=[{"settings": {}}]), 'arm 1 lacks "name", a text', 'write, for example, "name": "one"'),
    (mine(arms=[{"name": "one", "setting": {}}]), "arm 'one' has no key \"setting\"", "did you mean 'settings'?"),
    (mine(arms=mine()["arms"] * 2), "two arms are called 'one'", "give each a name of its own"),
    (
        mine(arms=[*mine()["arms"], {"name": "one (again)", "settings": {}}]),
        "an arm is called 'one (again)', as the A/A control is",
        "give it another name",
    ),
    (mine(arms=[{"name": f"a{i}", "settings": {}} for i in range(300)]), "has 300 arms, more than 256", "take fewer"),
    (
        mine(arms=[{"name": "a" * 81, "settings": {}}]),
        f'arm {"a" * 81!r} has the name "{"a" * 36}...',
        "a name is up to 80",
    ),
    (stack(changes=[{"name": "x"}]), "change 'x' changes nothing", 'give it a "set" or an "unset"'),
    (
        stack(changes=stack()["changes"] * 2),
        "the experiment has two changes called 'small'",
        "give each a name of its own",
    ),
    (
        stack(changes=[{"name": "x", "set": {"a": 1}, "needs": ["y"]}]),
        "the experiment has a change 'x' that needs 'y', which is no other change",
        "changes: ",
    ),
    (
        stack(changes=[{"name": "x", "unset": ["compresion"]}]),
        "the experiment has a change 'x' that unsets 'compresion', which nothing sets",
        "did you mean 'compression'?",
    ),
    (
        stack(changes=[{"name": "x", "unset": "compression"}]),
        'change \'x\' has "unset": "compression"; it must be a list of texts',
        'write, for example, "unset": ["one", "two"]',
    ),
    (
        stack(changes=[{"name": "x", "set": {"compression": "none"}}]),
        "step 'x' has the settings of an earlier one",
        "take it out",
    ),
    (stack(base={}), 'the base lacks "settings", an object', 'write, for example, "settings"'),
    (
        stack(design="combinations", combinations=[{"changes": ["small", "smal"]}]),
        'combination 1 has the change "smal"',
        "did you mean 'small'?",
    ),
    (
        stack(design="combinations", combinations=[{"changes": ["small"]}]),
        "combination 1 is not two or more different changes",
        "write, for example",
    ),
    (points(factors={}), "the experiment has no factors", "write, for example"),
    (
        points(factors={"threads": [1]}),
        "factor 'threads' has not two or more different levels",
        "write, for example, [1, 128]",
    ),
    (
        points(factors={"threads": [1, "a/b"]}),
        "factor 'threads' has the level \"a/b\", which makes no name",
        "write it as an object of levels by name; a name is up to 80",
    ),
    (
        points(factors={"threads": 2}),
        "factor 'threads' is neither a list of values nor an object of levels",
        "write, for example, [1, 128]",
    ),
    (
        points(factors={"threads": {"one": {"sets": {}}}}),
        "factor 'threads', level 'one', has no key \"sets\"",
        "did you mean 'set'?",
    ),
    (
        points(factors={f"f{i}": [0, 1] for i in range(6)}),
        "a full factorial of 6 factors has too many arms: it takes up to 5",
        'write "design": "fractional"',
    ),
]


@pytest.mark.parametrize(("content", "message", "remedy_start"), ERRORS)
def test_what_is_refused_in_a_file_of_ours(written, content, message, remedy_start):
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
        ('{"runs": 5, "runs": 6}', 'is not JSON: "runs" stands twice in one object'),
        ('{"runs": NaN}', "is not JSON: NaN is no number"),
        ('{"runs": 1e999}', "is not JSON: Out of range float values"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
        ('{"name": "\\ud800"}', "is not JSON: 'utf-8' codec can't encode"),
        ('{"name": "' + '\\"' * 500_000, "is not JSON: Unterminated string"),
        (" " * (1 << 20) + "{}", "is larger than 1,048,576 bytes: no experiment"),
    ],
)
def test_what_is_no_json(written, text, message):
    with pytest.raises(UsageError) as caught:
        read_experiment(written(text))
    assert caught.value.message.startswith(message)
    assert caught.value.remedy


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="is not JSON: 'utf-8' codec can't decode"):
        read_experiment(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("content", "message", "remedy"),
    [
        (
            mine(arms=[{"name": "one", "settings": {"tool": "dcp", "thread": 2}}]),
            "arm 'one': tool 'dcp' has no setting 'thread'",
            "did you mean 'threads'?",
        ),
        (stack(base={"settings": {"tool": "holdfasst"}}), "arm 'base': there is no tool 'holdfasst'", None),
        (points(factors={"threads": [1, 0]}), "arm 'threads=0': tool 'dcp': setting 'threads'", None),
    ],
)
def test_settings_are_the_workloads_business(written, content, message, remedy):
    path = written(content)
    read_experiment(path)
    with pytest.raises(UsageError) as caught:
        read_experiment(path, check_settings=make)
    assert caught.value.message.startswith(message)
    assert caught.value.path == str(path)
    assert remedy is None or caught.value.remedy == remedy


# Finding an experiment, and changing one


def test_a_name_that_there_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_experiment("tree-way")
    assert caught.value.message == "there is no experiment 'tree-way'"
    assert caught.value.remedy == "did you mean 'three-way'? (or give the path of a JSON file)"
    with pytest.raises(UsageError) as caught:
        read_experiment("zzz")
    assert caught.value.remedy == f"experiments: {', '.join(shipped())} (or give the path of a JSON file)"


def test_a_path_that_there_is_not(tmp_path):
    for path in (tmp_path / "no.json", str(tmp_path / "no.json"), tmp_path):
        with pytest.raises(UsageError, match="cannot read the experiment: ") as caught:
            read_experiment(path)
        assert caught.value.path == str(path)


def test_a_name_wins_over_a_file_and_a_path_over_a_name(written, monkeypatch):
    path = written(mine(), "three-way")
    monkeypatch.chdir(path.parent)
    assert read_experiment("three-way").arms[0].name == "pytorch"
    assert read_experiment(f".{os.sep}three-way").arms[0].name == "one"
    assert read_experiment(Path("three-way")).arms[0].name == "one"


def test_changed_copies():
    planned = read_experiment("six-way")
    before = planned.as_dict()
    assert planned.with_runs(7).runs == 7
    assert planned.with_seed(3).seed == 3
    assert planned.with_model("openllama-3b:first-100").settings["model"] == "openllama-3b:first-100"
    assert planned.with_model(slow_model="openllama-3b:layers=1").settings["slow_model"] == "openllama-3b:layers=1"
    assert planned.with_model(slow_model="openllama-3b:layers=1").settings["model"] == planned.settings["model"]
    stored = planned.with_source("some.ckpt")
    assert (stored.settings["from"], stored.settings["model"]) == ("some.ckpt", None)
    assert stored.with_model("openllama-3b").settings["from"] is None
    assert planned.as_dict() == before
    with pytest.raises(UsageError, match="an experiment runs 1 to 1000 times, not 0"):
        planned.with_runs(0)
    with pytest.raises(UsageError, match='settings has no key "mode"'):
        planned.with_settings(mode="x")


def test_some_of_the_arms():
    planned = read_experiment("six-way")
    some = planned.only(["t5x", "ts+chunks"])
    assert [arm.name for arm in some.arms] == ["tensorstore", "tensorstore (again)", "t5x", "ts+chunks"]
    with pytest.raises(UsageError, match="experiment 'six-way' has no arm 'ts-chunks'") as caught:
        planned.only(["ts-chunks"])
    assert caught.value.remedy == "did you mean 'ts+chunks'?"


def test_some_arms_of_a_design_are_no_design():
    planned = read_experiment("from-baseline-to-tensorkeep")
    assert planned.only([arm.name for arm in planned.arms]) is planned
    some = planned.only(["+raw", "tensorkeep"])
    assert (some.design, some.omitted) == ("arms", ())
    assert [arm.place["kind"] for arm in some.arms] == ["arm", "control", "arm", "arm"]


def test_with_and_without_a_control():
    planned = read_experiment("six-way")
    without_it = planned.with_control(False)
    assert [arm.role for arm in without_it.arms] == ["baseline", *["arm"] * 5]
    assert not without_it.control
    assert without_it.with_control(True) == planned
