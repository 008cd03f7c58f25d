"""The tiers and profiles of the tests, shared servers; a report with the coder, and the fault cases of each file."""

import gc
import itertools
import multiprocessing.util
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from hypothesis import HealthCheck, settings

from tensorkeep.codecs import coder

if TYPE_CHECKING:
    from store_servers import Proxy

# Fixtures that tests of several packages use.
pytest_plugins = ["command_line", "fault_cases"]

# A shared machine is sometimes slow; tests assert nothing about time. `make torture` chooses the other profiles, which
# try other examples each time; that of `make test` are always the same.
for profile, examples in {"sample": 20, "sanitized": 100, "thorough": 400}.items():
    always = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile(profile, max_examples=examples, derandomize=profile == "sample", **always)
settings.load_profile("sample")

# Where the tests are a background job, or run under nohup, these are ignored, in the processes that they start as well.
for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
    signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])


# The tiers: a test that starts a process, a server, a compiler or a rank is marked `integration`; one that tries all
# cases is marked `exhaustive`; all others are unit tests, and fail where they, or their fixtures, start anything.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind", "socket.connect"}
_started: set[str] = set()
_folders = itertools.count()


def _note_start(event: str, given: tuple[Any, ...], starts: set[str] = STARTS, started: set[str] = _started) -> None:
    # The sets are bound here, as the interpreter clears this module at its end before it stops calling this.
    # urllib3 binds a socket to that address when it is imported, to look for IPv6.
    if event in starts and (event, *given[1:2]) != ("socket.bind", ("::1", 0)):
        started.add(event)


def _noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that notes its calls, which no audit event reports."""

    @wraps(function)
    def noted(*given: Any, **options: Any) -> Any:
        if options.get("backend", given[:1]) not in ("fake", ("fake",)):
            _started.add(name)
        return function(*given, **options)

    return noted


sys.addaudithook(_note_start)
multiprocessing.util.spawnv_passfds = _noted(multiprocessing.util.spawnv_passfds, "multiprocessing")


def _compiled_frames() -> int:
    """Return how many functions torch has compiled, or traced to be compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["frames"]["total"] if dynamo else 0


def _seed() -> None:
    """Let a test, or a fixture, draw the same numbers whatever ran before it in its process."""
    random.seed(0)
    numpy.random.seed(0)
    import torch

    # torch.manual_seed() would write a stack trace for CUDA, each time.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note process groups. xdist's own process runs no test: it does without torch, whose import takes seconds."""
    if hasattr(session.config, "workerinput") or session.config.getoption("dist", "no") == "no":
        from torch import distributed

        distributed.init_process_group = _noted(distributed.init_process_group, "torch.distributed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-server", default="memory", help="the S3 server of tests: memory, ministack or moto")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[Any]:
    """Remember what a fixture starts for all tests that use it, and seed it."""
    before = {*_started}
    _started.clear()
    _seed()
    try:
        return (yield)
    finally:
        fixturedef.starts = {*_started}
        _started.update(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the fork server of the tests before the package starts one, which would have imported less."""
    if any(mark.args == ("processes",) for mark in item.iter_markers("xdist_group")):
        from forked import start_server

        start_server()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Fail a unit test that has started something, in its fixtures as well."""
    frames = _compiled_frames()
    _started.clear()
    _seed()
    result = yield
    if _compiled_frames() != frames:
        _started.add("torch.compile")
    for fixture in item._request._fixture_defs.values():
        _started.update(getattr(fixture, "starts", ()))
    if _started and not any(map(item.get_closest_marker, ("integration", "exhaustive", "gpu"))):
        pytest.fail(f"mark this test `integration`: it starts something ({', '.join(sorted(_started))})")
    return result


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return an empty folder, which stays if the test fails. pytest's own lists those of all earlier tests first."""
    failed = request.session.testsfailed
    folder = tmp_path_factory.mktemp(f"test-{next(_folders)}", numbered=False)
    yield folder
    if request.session.testsfailed == failed:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that starts a server of `store_servers.SERVERS` on its first use, and returns its URL."""
    from store_servers import SERVERS

    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(SERVERS[name](tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def server(s3_url_of: Callable[[str], str], request: pytest.FixtureRequest) -> "Iterator[Proxy]":
    """Return a proxy before a server of `store_servers.SERVERS`, which a test may name as a parameter of this.

    By default it is the server in this process, which is quick. `make torture` has another implementation, ministack.
    """
    from store_servers import proxy_for

    with proxy_for(s3_url_of(getattr(request, "param", request.config.option.store_server))) as proxy:
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup``, let one worker run the tests of a file, unless they name another group."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

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
