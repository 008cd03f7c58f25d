"""The profile of property tests, the order of tests; a report with the coder, and the fault cases of each file."""

import gc
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tensorkeep.codecs import coder

# A shared machine is sometimes slow; tests assert nothing about time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# These take longest. They start first, so that no worker is busy with one of them while the others have ended.
LONGEST = (
    "train/techniques/test_distributed_",
    "train/techniques/test_compile.py",
    "faults/test_interrupted_",
    "faults/test_killed_training.py",
    "bench/run/test_cell.py",
    "cli/test_bench",
    "cli/test_train.py",
    "test_examples.py",
    "train/test_loop.py",
)

# These fork from the server of `forked`, which imports for seconds.
FORKED = (
    "train/techniques/test_distributed_",
    "faults/test_killed_training.py",
    "faults/test_readers_beside_a_writer.py",
    "cli/test_train.py",
    "::test_many_readers_beside_a_writer",
    "::test_killed_at_any_operation_beside_threads",
    "::test_interrupted_run_keeps_its_results_and_resumes",
    # These call the ranks of `ranks`.
    "ranks",
    "distributed/test_",
)


# Importing and collecting make millions of objects and no garbage, and a full collection later would visit them all.
gc.disable()


def pytest_report_header() -> str:
    return f"coder: {coder.describe()}"


def pytest_collection_finish() -> None:
    """Collect garbage again, without visiting the imported objects, here and in processes forked from this one."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    if "ranks" in sys.modules:
        sys.modules["ranks"].close_ranks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(each in item.nodeid for each in LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests that fork from a server in one worker, so that the server and the two ranks start once."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "forked" if any(each in nodeid for each in FORKED) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up the counts that tests recorded with ``record_property("cases", n)``, from all workers."""
    cases: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                counts = [value for name, value in report.user_properties if name == "cases"]
                cases[report.nodeid.partition("::")[0]] += sum(counts)
    cases = +cases
    if cases:
        terminalreporter.section("cases of the fault tests")
        for file, count in sorted(cases.items()):
            terminalreporter.write_line(f"{count:>7,} {file}")
        terminalreporter.write_line(f"{cases.total():>7,} in all")
