"""A TCP proxy that limits the rate of what clients send, and counts the bytes in both directions.

It is a process of its own, ``python benchmarks/link.py SERVER_PORT BYTES_PER_SECOND``, which prints its port and then,
for each line of its standard input, the bytes sent by clients and by the server so far.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from figures import Worker

PIECE_BYTES = 64 * 1024


@dataclass
class Link:
    """A running proxy."""

    url: str
    _worker: Worker

    def moved(self) -> tuple[int, int]:
        """Return the bytes that clients and the server have sent so far."""
        sent, received = self._worker.ask()
        return sent, received


@contextmanager
def link_to(server_port: int, bytes_per_second: float) -> Iterator[Link]:
    """Run the proxy, at the lowest priority, because in use it and the server are elsewhere."""
    worker = Worker("nice", "-n", "19", sys.executable, __file__, str(server_port), str(bytes_per_second))
    try:
        [port] = worker.answer()
        yield Link(f"http://127.0.0.1:{port}", worker)
    finally:
        worker.close()


class _Pace:
    """Lets so many bytes pass in a second, from all threads together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()
        self.count = 0

    def take(self, count: int) -> None:
        """Wait until so many bytes may pass."""
        with self._lock:
            self.count += count
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def _copy(source: socket.socket, target: socket.socket, pace: _Pace) -> None:
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    with suppress(OSError):
        while count := source.recv_into(buffer):
            pace.take(count)
            target.sendall(view[:count])
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _serve(server_port: int, bytes_per_second: float) -> None:
    up, down = _Pace(bytes_per_second), _Pace(float("inf"))
    with socket.socket() as listening:
        # Small buffers, so that senders wait as they would for a network.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE_BYTES)
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        print(json.dumps([listening.getsockname()[1]]), flush=True)

        def accept() -> None:
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", server_port))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for pair in ((client, server, up), (server, client, down)):
                    threading.Thread(target=_copy, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        for _ in sys.stdin:
            print(json.dumps([up.count, down.count]), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
