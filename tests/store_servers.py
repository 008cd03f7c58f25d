"""Object stores for tests: S3 servers on this machine, and a proxy before them that fails requests on purpose.

While a proxy runs, its process waits by a clock on which time passes only while code sleeps: no test waits until a
request is repeated or given up, or depends on how fast the machine is.
"""

import math
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from memory_store import MemoryStore, Reply
from tensorkeep.paths import StorePath
from tensorkeep.storage import store_requests
from tensorkeep.storage.clock import Clock, use_clock

ACTIONS = ("500", "503", "reset", "lost", "truncated", "short", "slow", "stalled", "late", "later", "403")
"""What happens to requests, and may pass; `Fault` says what each is."""

ACCESS_KEY = "user-not-to-print"
SECRET = "do-not-print-this"

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}

_ERRORS = {"400": "ExpiredToken", "403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}

_LEFT_OUT = {"unconditional": {"if-none-match"}, "untagged": {"etag"}}
"""Headers that a server without conditional requests ignores, or does not send."""


class JumpingClock(Clock):
    """A clock on which each sleep takes no time and passes fifty times as long; libraries hardly pause."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def monotonic(self) -> float:
        return self._seconds

    def sleep(self, seconds: float) -> None:
        self._seconds += 50 * seconds

    def library_pause(self, seconds: float) -> float:
        return seconds / 1000

    def patience(self, seconds: float) -> float:
        return 60


@contextmanager
def _memory_server(folder: Path) -> Iterator[str]:
    """Run an S3 server in the memory of this process; yield its URL."""
    proxy = Proxy("", MemoryStore().answer)
    with proxy.serving() as url:
        _in_memory[url] = proxy.answer
        yield url


@contextmanager
def _process_server(folder: Path, module: str, *options: str) -> Iterator[str]:
    """Run an S3 server in the memory of another process until the end of the context; yield its URL once it listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    options = tuple(option.format(port) for option in options)
    environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3", "IOT_MTLS_ENABLED": "0"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", module, *options],
            env={**os.environ, **environment, "TMPDIR": str(folder)},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            end = time.monotonic() + 60
            while not _listens(port):
                ended = server.poll() is not None or time.monotonic() > end
                assert not ended, f"the server did not start: {(folder / 'server.log').read_text()}"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()  # it has no state to keep, and would wait for idle connections
            server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


SERVERS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "memory": _memory_server,
    "ministack": lambda folder: _process_server(folder, "ministack"),
    # It looks for an object and then writes it, in two steps: of writers that race, several may win.
    "moto": lambda folder: _process_server(folder, "moto.server", "-H", "127.0.0.1", "-p", "{}"),
}
"""Ours, which most tests use, and independent implementations of S3, all with conditional requests."""

_in_memory: dict[str, "Answer"] = {}
"""What answers at the URL of each server in memory."""


def make_bucket(url: str, name: str) -> None:
    """Create a bucket, unless it exists."""
    try:
        urlopen(Request(f"{url}/{name}", method="PUT")).close()
    except HTTPError as error:
        error.close()
        if error.code != 409:
            raise


def upload(path: Path, url: str) -> str:
    """Copy a file, or the files of a folder, to a URL; return it."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            store_requests.put(StorePath(url) / file.relative_to(path), file.read_bytes())
    return url


def damage(path: StorePath) -> None:
    """Flip the last bit of an object."""
    content = bytes(store_requests.get(path))
    store_requests.put(path, content[:-1] + bytes([content[-1] ^ 1]))


def environment_of(url: str, *, seconds: float = 20) -> dict[str, str]:
    """Return the environment variables with which a process uses a server; one request may take so many seconds."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "TENSORKEEP_STORE_TIMEOUT": str(seconds),
    }


def always(number: int) -> bool:
    return True


@dataclass
class Fault:
    """What happens to some of the requests: those whose number, from 0, ``hits`` accepts.

    The actions are

    * ``400``, ``403``, ``500`` and ``503``: the request is answered with an error, and not carried out;
    * ``echo``: so it is, and the answer repeats the request;
    * ``reset``: the connection is reset before the request is read;
    * ``lost``: the request is carried out, and the connection closed without an answer;
    * ``truncated``: the connection is closed in the middle of the answer;
    * ``short``: an object's content comes without its last byte, and with a length that fits;
    * ``unconditional``: it is carried out as if it had no ``If-None-Match``;
    * ``untagged``: the answer comes without its ``ETag``;
    * ``late`` and ``later``: the connection is reset, and `Proxy.carry_out_late` carries out the request; its repeats
      are refused with 403;
    * ``slow``: the request is carried out 0.02 s later;
    * ``stalled``: the request is carried out, and half of the answer sent, until the client closes the connection;
    * ``kill`` and ``kill after``: the client is killed before or after the request is carried out.
    """

    action: str
    hits: Callable[[int], bool]

    def strikes(self, number: int, request: str) -> bool:
        """Return whether it happens to this request; called once for each, in the order of their numbers."""
        return self.hits(number)


class FaultAt(Fault):
    """A fault of one request and of its repeats: so many times in all, by default for ever.

    The request is the one with a number, or the first that contains a text, where several are sent at a time.
    """

    def __init__(self, action: str, which: int | str, times: float = math.inf) -> None:
        super().__init__(action, lambda number: number == which)
        self._which = which
        self.left = times
        self._request: str | None = None

    def strikes(self, number: int, request: str) -> bool:
        named = isinstance(self._which, str) and self._which in request
        if self._request is None and (named or self.hits(number)):
            self._request = request
        if request != self._request or not self.left:
            return False
        self.left -= 1
        return True


Answer = Callable[[str, str, Mapping[str, str], bytes], Reply]
"""Returns the answer to a request: its method, path, headers and body."""


@dataclass
class Proxy:
    """A proxy that counts requests, and fails some."""

    target: str  # the URL of the server itself, which no fault disturbs
    answer: Answer  # carries out a request
    url: str = ""
    fault: Fault | None = None
    requests: list[str] = field(default_factory=list)  # method, path and range of each request so far
    answered_bytes: int = 0  # of the contents of all answers so far
    late: list[tuple[str, str, Mapping[str, str], bytes]] = field(default_factory=list)  # still to be carried out
    client: "queue.Queue[int]" = field(default_factory=queue.Queue)  # gets the process that a request is to kill
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start_again(self, fault: Fault | None) -> None:
        """Forget the requests so far, and fail those to come as ``fault`` says."""
        with self._lock:
            self.requests = []
            self.late = []
            self.answered_bytes = 0
            self.client = queue.Queue()
            self.fault = fault

    def _action(self, request: str) -> str:
        """Note a request, and return what happens to it."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            fault = self.fault
            return fault.action if fault is not None and fault.strikes(number, request) else "none"

    def carry_out_late(self) -> None:
        """Carry out the request whose connection was reset."""
        while self.late:
            self.answer(*self.late.pop())

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Answer until the end of the context; yield the URL."""

        class Handler(_Handler):
            shared: ClassVar[Proxy] = self

        with serving(Handler) as self.url:
            yield self.url


@contextmanager
def proxy_for(target: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server, and a clock on which no time passes while requests are repeated."""
    proxy = Proxy(target, _in_memory.get(target, partial(_sent_on, target)))
    with proxy.serving(), use_clock(JumpingClock()):
        yield proxy


def _sent_on(target: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
    """Return the answer of a server in another process."""
    with closing(HTTPConnection(target.removeprefix("http://"), timeout=30)) as connection:
        connection.request(method, path, body, dict(headers))
        reply = connection.getresponse()
        content = reply.read()
    kept = [(name, value) for name, value in reply.getheaders() if name.lower() not in _HOP_BY_HOP]
    announced = int(reply.getheader("content-length") or len(content))
    return Reply(reply.status, kept, content or bytes(announced))


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a web server on a thread until the end of the context; yield its URL."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def shutdown_request(self, request: Any) -> None:
        # Without a FIN first, so that a reset is one.
        self.close_request(request)

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have hung up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version: ClassVar[str] = "HTTP/1.1"
    disable_nagle_algorithm = True
    shared: ClassVar[Proxy]

    def _forward(self) -> None:
        """Send the request to the server, and its answer, or what the action leaves of it, to the client."""
        action = self.shared._action(" ".join([self.command, self.path, self.headers.get("range", "")]).strip())
        if action == "reset":
            self._reset()
            return
        announced = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(announced)
        if len(body) < announced:  # the client has ended meanwhile
            self.close_connection = True
            return
        if action in ("late", "later"):
            if not self.shared.late:
                self.shared.late.append((self.command, self.path, dict(self.headers), body))
                self._reset()
                return
            action = "403"
        if action in _ERRORS:
            self._answer(int(action), [], f"<Error><Code>{_ERRORS[action]}</Code></Error>".encode())
            return
        if action == "echo":
            self._answer(403, [], f"{self.command} {self.path}\n{self.headers}\n{self.headers.items()}".encode())
            return
        if action == "kill":
            self._kill_client()
            return
        if action == "slow":
            time.sleep(0.02)
        left_out = _LEFT_OUT.get(action, set())
        asked = {name: self.headers[name] for name in self.headers if name.lower() not in left_out}
        status, headers, content = self.shared.answer(self.command, self.path, asked, body)
        headers = [(name, value) for name, value in headers if name.lower() not in left_out]
        if action == "kill after":
            self._kill_client()
        elif action == "lost":
            self._hang_up()
        elif action in ("truncated", "stalled"):
            self._answer_half(status, headers, content)
            if action == "stalled":
                select.select([self.connection], [], [], 30)
            self._hang_up()
        else:
            short = action == "short" and self.command == "GET" and len(content) > 1
            self._answer(status, headers, content[:-1] if short else content)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes | memoryview, length: int | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            with self.shared._lock:
                self.shared.answered_bytes += len(content)

    def _answer_half(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        """Send half of the content, or, of an answer without content, half of the first line."""
        if content and self.command != "HEAD":
            self._answer(status, headers, memoryview(content)[: len(content) // 2], len(content))
        else:
            self.wfile.write(f"HTTP/1.1 {status}".encode())

    def _reset(self) -> None:
        # Closed with a linger time of 0, a connection is reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _kill_client(self) -> None:
        os.kill(self.shared.client.get(timeout=60), signal.SIGKILL)
        self._hang_up()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler._forward)
