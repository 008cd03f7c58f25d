"""Pytest plugin of CI: which exhaustive tests run today, and a record of what ran, for `run_tests.py`.

All tests that are not exhaustive run. An exhaustive test runs every 24th day, or every 12th day if the change touches
its subject; a page of the documentation also if it is changed. Together they run in `make torture`, and every night.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

EVERY_DAYS, TOUCHED_DAYS = 24, 12
SITE = "tests/documentation/test_site.py"
CORE = "packages/tensorkeep/src/tensorkeep"
TRAINER = "packages/chatgot/src/chatgot"
BENCH = "packages/tensorkeep-bench/src/tensorkeep_bench"
RANKS = ("tests/ranks.py", "tests/forked.py", f"{CORE}/ranks", f"{CORE}/formats/native")
STORES = ("tests/store_servers.py", "tests/memory_store.py", f"{CORE}/storage", f"{CORE}/runs", f"{CORE}/manager.py")


def core(*names: str) -> tuple[str, ...]:
    return tuple(f"{CORE}/{name}" for name in names)


SUBJECTS: dict[str, tuple[str, ...]] = {
    # The tests of `tensorkeep`, by folder.
    **{
        f"packages/tensorkeep/tests/{folder}": subjects
        for folder, subjects in {
            "checkpoint": core("checkpoint", "state"),
            "checkpoint/manager": core("runs", "manager.py"),
            "checkpoint/local_tier": core("runs", "manager.py"),
            "checkpoint/ranks": RANKS,
            "cli": core("cli"),
            "codecs": (*core("codecs"), "packages/tensorkeep/src/coder"),
            "coder": (*core("codecs"), "packages/tensorkeep/src/coder"),
            "distributed": core("distributed", "formats/dcp"),
            "faults": (
                *core("storage", "formats", "checkpoint", "runs"),
                *("packages/tensorkeep/tests/faults/injection.py", "tests/fault_cases.py"),
            ),
            "faults/ranks": RANKS,
            "faults/stores": STORES,
            "formats": core("formats", "storage", "state"),
            "integrations": core("integrations", "ranks", "manager.py"),
            "pages": core("pages"),
            "state": core("state"),
            "storage": STORES,
        }.items()
    },
    "packages/tensorkeep-formats/tests": ("packages/tensorkeep-formats/src", *core("formats")),
    "packages/chatgot/tests": (TRAINER,),
    "packages/tensorkeep-bench/tests": (BENCH,),
    "packages/tensorkeep-bench/tests/report": (f"{BENCH}/report", *core("pages")),
    "tests/cli": (*core("cli"), f"{TRAINER}/cli", f"{BENCH}/cli"),
    "tests/documentation": ("docs", "README.md", "examples", *core("cli")),
    "tests/formats": (*core("formats"), *STORES),
    "tests/test_ci.py": (".ci",),
    "tests/test_examples.py": ("examples", TRAINER, *core("checkpoint")),
    "tests/test_pages_in_a_browser.py": (*core("pages"), f"{BENCH}/report"),
    "tests/test_ranks.py": RANKS,
}
"""What tests are about, by the start of their path; the longest start counts."""


def subject_of(node_id: str) -> tuple[str, ...]:
    """Return the sources that a test is about; the test itself is one of them."""
    file = node_id.partition("::")[0]
    starts = [each for each in SUBJECTS if file == each or file.startswith(f"{each}/")]
    return (file, *(SUBJECTS[max(starts, key=len)] if starts else ()))


def is_touched(node_id: str, changed: Iterable[str]) -> bool:
    """Whether a change of these files touches the subject of a test."""
    return any(path == each or path.startswith(f"{each}/") for path in changed for each in subject_of(node_id))


def has_its_turn(node_id: str, day: int, changed: Iterable[str]) -> bool:
    """Whether an exhaustive test runs on a day of the year, after a change of these files."""
    file, _, parameters = node_id.rstrip("]").partition("[")
    if file.startswith("tests/documentation/") and parameters in changed:
        return True  # a page that is changed
    period = TOUCHED_DAYS if is_touched(node_id, changed) else EVERY_DAYS
    # The tests of the site all need its build, which takes longer than they do.
    name = SITE if node_id.startswith(SITE) else node_id
    return (zlib.crc32(name.encode()) + day) % period == 0


def plain(node_id: str) -> str:
    """Return the identifier of a test without its group, which xdist appends."""
    return node_id.rpartition("@")[0] if node_id.rfind("@") > node_id.rfind("]") else node_id


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("CI")
    group.addoption("--day", type=int, help="day of the year, by which exhaustive tests are chosen")
    group.addoption("--changed", action="append", default=[], metavar="PATH", help="a file that the change touches")
    group.addoption("--only", type=Path, metavar="FILE", help="run the tests that this JSON file lists")
    group.addoption("--record", type=Path, metavar="FILE", help="write what was collected, done and failed, as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only, day, changed = config.option.only, config.option.day, config.option.changed
    if only is not None:
        wanted = set(json.loads(only.read_text()))
        chosen = [item for item in items if plain(item.nodeid) in wanted]
    else:
        chosen = [
            item
            for item in items
            if not item.get_closest_marker("exhaustive") or has_its_turn(plain(item.nodeid), day, changed)
        ]
    left_out = set(items).difference(chosen)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
    items[:] = chosen


class Recorder:
    """Records what became of tests and workers, for `run_tests.Ended`, in the process that controls the workers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._found["collected"].update(plain(item.nodeid) for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._found["collected"].update(map(plain, ids))
        self._found["workers"].add(node.gateway.id)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._found["not_collected"].add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        node_id = plain(report.nodeid)
        if report.when == "call" and report.passed:
            self._found["passed"].add(node_id)
        if report.failed:
            self._found["failed"].add(node_id)
        if report.failed and report.when == "teardown":
            self._found["failed_at_end"].add(node_id)
        if report.failed or report.when == "teardown":
            self._found["done"].add(node_id)
        if report.when not in ("setup", "call", "teardown"):  # its worker ended during it
            self._found["broken_workers"].discard(report.node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        # If a test was running then, the report of its failure follows.
        if error:
            self._found["broken_workers"].add(node.gateway.id)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps({name: sorted(each) for name, each in self._found.items()}))


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.record))
