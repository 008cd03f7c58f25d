"""The profile and the order of tests, shared servers; a report with the coder, and the fault cases of each file."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tensorkeep.codecs import coder

if TYPE_CHECKING:
    from store_servers import Proxy

# A shared machine is sometimes slow; tests assert nothing about time. `make torture` chooses the other profiles.
for profile, examples in {"sample": 30, "sanitized": 100, "thorough": 400}.items():
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("sample")

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
    "faults/stores/test_killed_writers.py",
    "faults/stores/test_racing_writers.py",
    "faults/test_killed_starts.py",
    "bench/checkpoint/test_first_load.py",
    "cli/test_demo.py",
    "cli/test_generate.py",
    "cli/test_train.py",
    "test_examples.py",
    "::test_many_readers_beside_a_writer",
    "::test_a_killed_process_leaves_its_steps_to_the_next",
    "::test_killed_at_any_operation_beside_threads",
    "::test_interrupted_run_keeps_its_results_and_resumes",
    # These call the ranks of `ranks`.
    "ranks",
    "distributed/test_",
)


@pytest.fixture(scope="session")
def s3_url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that starts a server of `store_servers.SERVERS` on its first use, and returns its URL."""
    from store_servers import SERVERS

    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(SERVERS[name](tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def server(s3_url_of: Callable[[str], str], request: pytest.FixtureRequest) -> "Iterator[Proxy]":
    """Return a proxy before a server of `store_servers.SERVERS`; ``on_every_server`` runs a test with each of them."""
    from store_servers import proxy_for

    with proxy_for(s3_url_of(getattr(request, "param", "ministack"))) as proxy:
        yield proxy


@pytest.fixture
def bucket(server: "Proxy", request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> "Proxy":
    """Return the proxy, through which the module's ``BUCKET`` is used; it exists, and no request fails."""
    from store_servers import environment_of, make_bucket

    make_bucket(server.target, request.module.BUCKET.removeprefix("s3://"))
    server.start_again(None)
    for name, value in environment_of(server.url).items():
        monkeypatch.setenv(name, value)
    return server


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
