"""Object stores for tests: S3 servers on this machine, and a proxy before them that fails requests on purpose."""

import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tensorkeep.io.objects import stores
from tensorkeep.paths import StorePath

ACCESS_KEY = "user-not-to-print"
SECRET = "do-not-print-this"

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}

_LEFT_OUT = {"unconditional": {"if-none-match"}, "untagged": {"etag"}}
"""Headers that a server without conditional requests ignores, or does not send."""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run ministack, an S3 server in memory; yield its URL."""
    port = free_port()
    environment = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "IOT_MTLS_ENABLED": "0",
        "TMPDIR": str(folder),
    }
    with _running([sys.executable, "-m", "ministack"], environment, port, folder) as url:
        yield url


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """Run moto, another S3 server in memory; yield its URL.

    It looks for an object and then writes it, in two steps: of writers that race, several may win.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, {}, port, folder) as url:
        yield url


SERVERS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {"ministack": s3_server, "moto": moto_server}
"""Independent implementations of S3, both with conditional requests."""

on_every_server = pytest.mark.parametrize("server", SERVERS, indirect=True)


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], port: int, folder: Path) -> Iterator[str]:
    """Run a server until the end of the context; yield its URL once it listens."""
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env={**os.environ, **environment}, cwd=folder, stdout=log, stderr=log)
        try:
            _wait_for(port, server, folder / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()  # it has no state to keep, and would wait for idle connections
            server.wait()


def _wait_for(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if server.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"the server did not start: {log.read_text()}")
        time.sleep(0.05)


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
            stores.put(StorePath(url) / file.relative_to(path), file.read_bytes())
    return url


def environment_of(url: str, *, seconds: float = 20) -> dict[str, str]:
    """Return the environment variables with which a process uses a server, and gives up after some seconds."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "TENSORKEEP_STORE_TIMEOUT": str(seconds),
    }


def give_up_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Stop repeating broken answers after some seconds, though one request may take longer: a busy machine is late."""
    connect = stores._connect
    monkeypatch.setattr(stores, "_connect", lambda bucket, endpoint, _: connect(bucket, endpoint, 20.0))
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", str(seconds))


@dataclass
class Fault:
    """What happens to some of the requests: those whose number, from 0, ``hits`` accepts.

    The actions are

    * ``500`` and ``503``: the request is answered with an error, and not carried out;
    * ``reset``: the connection is reset before the request is read;
    * ``lost``: the request is carried out, and the connection closed without an answer;
    * ``truncated``: the connection is closed in the middle of the answer;
    * ``short``: an object's content comes without its last byte, and with a length that fits;
    * ``unconditional``: it is carried out as if it had no ``If-None-Match``;
    * ``untagged``: the answer comes without its ``ETag``;
    * ``slow``: the request is carried out 0.1 s later;
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
        self._left = times
        self._request: str | None = None

    def strikes(self, number: int, request: str) -> bool:
        named = isinstance(self._which, str) and self._which in request
        if self._request is None and (named or self.hits(number)):
            self._request = request
        if request != self._request or not self._left:
            return False
        self._left -= 1
        return True


@dataclass
class Proxy:
    """A proxy that counts requests, and fails some.

    Attributes
    ----------
    url : str
    target : str
        The URL of the server itself, which no fault disturbs.
    fault : Fault or None
    requests : list of str
        Method, path and range of each request so far.
    answered_bytes : int
        Bytes of the contents of all answers so far.
    client : int or None
        The process to kill; a request that is to kill waits until it is known.
    """

    url: str
    target: str
    fault: Fault | None = None
    requests: list[str] = field(default_factory=list)
    answered_bytes: int = 0
    client: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start_again(self, fault: Fault | None) -> None:
        """Forget the requests so far, and fail those to come as ``fault`` says."""
        with self._lock:
            self.requests = []
            self.answered_bytes = 0
            self.client = None
            self.fault = fault

    def _action(self, request: str) -> str:
        """Note a request, and return what happens to it."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            fault = self.fault
            return fault.action if fault is not None and fault.strikes(number, request) else "none"

    def _kill_client(self) -> None:
        end = time.monotonic() + 30
        while self.client is None and time.monotonic() < end:
            time.sleep(0.001)
        if self.client is not None:
            os.kill(self.client, signal.SIGKILL)


@contextmanager
def proxy_for(target: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    proxy = Proxy("", target)

    class Handler(_Handler):
        shared: ClassVar[Proxy] = proxy

    with _Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield proxy
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
        proxy = self.shared
        action = proxy._action(" ".join([self.command, self.path, self.headers.get("range", "")]).strip())
        if action == "reset":
            self._reset()
            return
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if action in ("500", "503"):
            code = {"500": "InternalError", "503": "SlowDown"}[action]
            self._answer(int(action), [], f"<Error><Code>{code}</Code></Error>".encode())
        elif action == "kill":
            proxy._kill_client()
            self._hang_up()
        else:
            if action == "slow":
                time.sleep(0.1)
            self._pass_on(body, action)

    def _pass_on(self, body: bytes, action: str) -> None:
        """Send the request to the server, and its answer, or what the action leaves of it, to the client."""
        with closing(HTTPConnection(self.shared.target.removeprefix("http://"), timeout=30)) as connection:
            kept = {name: self.headers[name] for name in self.headers if name.lower() not in _LEFT_OUT.get(action, ())}
            connection.request(self.command, self.path, body, kept)
            reply = connection.getresponse()
            content = reply.read()
        dropped = _HOP_BY_HOP | _LEFT_OUT.get(action, set())
        headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in dropped]
        length = int(reply.getheader("content-length") or len(content))
        if action == "kill after":
            self.shared._kill_client()
            self._hang_up()
        elif action == "lost":
            self._hang_up()
        elif action in ("truncated", "stalled"):
            self._answer_half(reply.status, headers, content, length)
            if action == "stalled":
                select.select([self.connection], [], [], 30)
            self._hang_up()
        elif action == "short" and self.command == "GET" and len(content) > 1:
            self._answer(reply.status, headers, content[:-1])
        else:
            self._answer(reply.status, headers, content, length=length)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            with self.shared._lock:
                self.shared.answered_bytes += len(content)

    def _answer_half(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
        """Send half of the content, or, of an answer without content, half of the first line."""
        if content and self.command != "HEAD":
            self._answer(status, headers, content[: len(content) // 2], length=length)
        else:
            self.wfile.write(f"HTTP/1.1 {status}".encode())

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _reset(self) -> None:
        # Closed with a linger time of 0, a connection is reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler._forward)
