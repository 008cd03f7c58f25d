"""What CI runs: the share of the exhaustive tests, and once more, alone, what has failed (`.ci`)."""

import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from tiers import exhaustive

ROOT = Path(__file__).parents[1]

START = """import os
from pathlib import Path

import pytest


def fails_once(path):
    if path.exists():
        return False
    path.touch()
    return True


def test_good():
    pass


def test_once(request):
    assert not fails_once(Path(__file__).with_suffix(".once"))
"""

CRASHED = """
def test_crashed():
    if fails_once(Path(__file__).with_suffix(".crashed")):
        os._exit(3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(48))
def test_exhaustive(number):
    pass
"""

BAD = """
def test_bad():
    assert False


def test_then_skipped():
    assert not fails_once(Path(__file__).with_suffix(".skipped"))
    pytest.skip("it shows nothing")


@pytest.fixture(scope="module")
def bad_at_its_end():
    yield
    assert False


def test_with_it(bad_at_its_end):
    pass


def test_last():
    pass
"""
MANY = "@pytest.mark.parametrize('n', range(10))\ndef test_bad(n):\n    assert n > 99"
TWICE = [f"FAILED TWICE: tests/test_a.py::test_{name}" for name in ("bad", "then_skipped", "last")]
WORKER_FAILS = """import os


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        os._exit(1)
"""


@pytest.fixture(scope="module")
def share() -> ModuleType:
    spec = util.spec_from_file_location("share", ROOT / ".ci" / "share.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


IDS = [
    f"packages/{folder}/test_a.py::test_b[{number}]"
    for folder in ("chatgot/tests", "tensorkeep/tests/faults/stores")
    for number in range(200)
]


def test_each_exhaustive_test_has_its_turn_once_in_a_period(share: ModuleType) -> None:
    for node_id in IDS:
        assert sum(share.has_its_turn(node_id, day, []) for day in range(share.EVERY_DAYS)) == 1


def test_a_change_gives_more_turns_to_the_tests_of_its_subject_alone(share: ModuleType) -> None:
    changed = ["packages/chatgot/src/chatgot/loop.py"]
    for node_id in IDS:
        turns = sum(share.has_its_turn(node_id, day, changed) for day in range(share.EVERY_DAYS))
        assert turns == (share.EVERY_DAYS // share.TOUCHED_DAYS if "chatgot" in node_id else 1)


def test_a_page_that_is_changed_runs_and_the_tests_of_the_site_run_together(share: ModuleType) -> None:
    for day in range(24):
        assert share.has_its_turn("tests/documentation/test_pages.py::test_x[docs/start.md]", day, ["docs/start.md"])
        names = [f"{share.SITE}::test_x[{number}]" for number in range(20)]
        assert len({share.has_its_turn(name, day, ["docs/start.md"]) for name in names}) == 1


def test_the_longest_start_of_a_path_counts(share: ModuleType) -> None:
    assert share.is_touched(
        "packages/tensorkeep/tests/faults/test_commit.py::test_x",
        ["packages/tensorkeep/src/tensorkeep/storage/commit.py"],
    )
    assert not share.is_touched(
        "packages/tensorkeep/tests/faults/stores/test_calls.py::test_x",
        ["packages/tensorkeep/src/tensorkeep/state/tree.py"],
    )
    assert share.is_touched(
        "packages/tensorkeep/tests/faults/stores/test_calls.py::test_x",
        ["packages/tensorkeep/tests/faults/stores/test_calls.py"],
    )
    assert not share.is_touched(
        "packages/tensorkeep/tests/storage/test_lock.py::test_x",
        ["packages/tensorkeep/src/tensorkeep/storagex/other.py"],
    )


def test_every_exhaustive_test_has_subjects_that_exist(share: ModuleType) -> None:
    for start, subjects in share.SUBJECTS.items():
        assert all((ROOT / each).exists() for each in (start, *subjects)), start
    marked = [path for path in ROOT.glob("**/tests/**/*.py") if "mark.exhaustive" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in marked if path.name.startswith("test_") and path != Path(__file__)]
    assert names and [name for name in names if len(share.subject_of(name)) == 1] == []


def test_the_group_of_a_test_is_not_part_of_its_name(share: ModuleType) -> None:
    for name, grouped in {"a.py::b": "a.py::b@processes", "a.py::b[c@d]": "a.py::b[c@d]@e"}.items():
        assert share.plain(grouped) == share.plain(name) == name


@pytest.mark.xdist_group("named")
def test_xdist_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if request.config.getvalue("dist") == "loadgroup" and hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@named")


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("more", "conftest", "workers", "code", "words"),
    [
        (BAD, "", 0, 1, ["FLAKY", *TWICE]),
        *exhaustive(
            (CRASHED, "", 1, 0, ["FLAKY (failed, then passed alone): tests/test_a.py::test_once", "left out"]),
            (MANY, "", 0, 1, ["FAILED, 11 tests"]),
            ("def test_bad(", "", 0, 2, ["SyntaxError"]),
            ("", WORKER_FAILS, 1, 1, ["workers ended with an error: gw0"]),
        ),
    ],
    ids=["bad", "flaky", "many", "broken", "bad end"],
)
def test_what_fails_runs_once_more_alone(
    tmp_path: Path, more: str, conftest: str, workers: int, code: int, words: list[str]
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  exhaustive: all cases\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(START + more + "\n")
    (tmp_path / "tests" / "test_b.py").write_text(START if workers else "")
    (tmp_path / "tests" / "conftest.py").write_text(conftest)
    command = [sys.executable, ".ci/run_tests.py", "-p", "xdist", "-n", str(workers), "--max-worker-restart", "0"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert all(word in done.stdout for word in words), done.stdout
