"""Object stores for tests: an S3 server on this machine, and a proxy before it that fails requests on purpose."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import Request, urlopen

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


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
        **os.environ,
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "IOT_MTLS_ENABLED": "0",
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-m", "ministack"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(port, server, folder / "server.log")
            yield url
        finally:
            server.terminate()
            server.wait(10)


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
    """Create a bucket."""
    urlopen(Request(f"{url}/{name}", method="PUT")).close()


@dataclass
class Fault:
    """What happens to some of the requests: those whose number, from 0, ``hits`` accepts."""

    action: str
    hits: Callable[[int], bool]


@dataclass
class Proxy:
    """A proxy that counts requests, and fails some."""

    url: str
    fault: Fault | None = None
    requests: list[str] = field(default_factory=list)

    def start_again(self, fault: Fault | None) -> None:
        """Forget the requests so far, and fail those to come as ``fault`` says."""
        self.requests.clear()
        self.fault = fault


@contextmanager
def proxy_for(target: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""
    address = target.removeprefix("http://")
    proxy = Proxy("")
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with lock:
                number = len(proxy.requests)
                proxy.requests.append(f"{self.command} {self.path}")
            fault = proxy.fault
            action = fault.action if fault is not None and fault.hits(number) else "none"
            if action in ("500", "503"):
                self._answer(int(action), [], b"<Error><Code>SlowDown</Code></Error>")
                return
            if action == "reset":
                self._hang_up()
                return
            if action == "slow":
                time.sleep(0.3)
            connection = HTTPConnection(address, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers))
            reply = connection.getresponse()
            content = reply.read()
            headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in _HOP_BY_HOP]
            length = int(reply.getheader("content-length") or len(content))
            connection.close()
            if action == "lost":
                self._hang_up()
            elif action == "truncated":
                self._answer(reply.status, headers, content[: len(content) // 2], length=length)
                self._hang_up()
            elif action == "short" and self.command == "GET" and len(content) > 1:
                self._answer(reply.status, headers, content[:-1])
            else:
                self._answer(reply.status, headers, content, length=length)

        def _answer(
            self, status: int, headers: list[tuple[str, str]], content: bytes, length: int | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _hang_up(self) -> None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        setattr(Handler, f"do_{method}", Handler._forward)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Ignore clients that have hung up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield proxy
        server.shutdown()
        thread.join()
