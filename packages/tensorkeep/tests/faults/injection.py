"""Fault injection: an error, a short write, SIGKILL or a stop at any file-system operation.

A checkpoint's writer changes the file system through the functions of `os` and one rename call. Inside `broken`, those
are counted, and the one that is asked for fails. Of many ranks, what they exchange counts as well. Trying every index
in turn walks through every instant at which a save can be interrupted::

    for index in range(count_operations(save)):
        with broken(fail_at=index, action=raise_error(errno.ENOSPC)):
            ...
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tensorkeep.ranks.group import Channel
from tensorkeep.storage import commit

Action = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Is called with the name of the operation, the real function and its arguments, in place of the function."""

OPERATIONS = (
    *("mkdir", "open", "posix_fallocate", "pwrite", "ftruncate", "fsync"),
    *("link", "rename", "replace", "unlink", "rmdir"),
)

_EXCHANGES = ("connect", "_gather")


class Operations:
    """Counts file-system operations, keeps the names of those seen so far, and breaks one of them."""

    def __init__(self, fail_at: int | None, action: Action | None) -> None:
        self.seen: list[str] = []
        self._fail_at, self._action = fail_at, action
        self._lock = threading.Lock()

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a stand-in for a function."""

        def operation(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return real(*args, **kwargs)  # reading changes nothing
            with self._lock:
                index = len(self.seen)
                self.seen.append(name)
            if index == self._fail_at and self._action is not None:
                return self._action(name, real, args, kwargs)
            return real(*args, **kwargs)

        return operation


@contextmanager
def broken(*, fail_at: int | None = None, action: Action | None = None) -> Iterator[Operations]:
    """Count the operations in this context, and call ``action`` in place of the one with index ``fail_at``."""
    operations = Operations(fail_at, action)
    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(mock.patch.object(os, name, operations.wrap(name, getattr(os, name))))
        renamed = operations.wrap("renameat2", commit._rename)
        stack.enter_context(mock.patch.object(commit, "_rename", renamed))
        for name in _EXCHANGES:
            method = operations.wrap(name.strip("_"), getattr(Channel, name))
            stack.enter_context(mock.patch.object(Channel, name, method))
        yield operations


def count_operations(save: Callable[[], object]) -> int:
    """Run a save once and return how many operations it performed."""
    with broken() as operations:
        save()
    return len(operations.seen)


def raise_error(number: int) -> Action:
    """Return an action that fails with an error number, such as ``errno.ENOSPC``."""

    def action(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("gather", "connect"):
            return real(*args, **kwargs)  # not an operation of the file system
        raise OSError(number, os.strerror(number))

    return action


def write_short(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write only the first half, as the kernel may; other operations are unchanged."""
    if name == "pwrite":
        descriptor, data, offset = args
        return real(descriptor, memoryview(data)[: max(1, len(data) // 2)], offset)
    return real(*args, **kwargs)


def die(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Kill this process before the operation, as the out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Kill this process right after the operation, whether it succeeded or not."""
    try:
        real(*args, **kwargs)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def stop(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stop this process before the operation, as a hung disk does, until it gets SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args, **kwargs)


def flip_bit(file: Path, place: int, bit: int = 0) -> None:
    """Flip a bit of the byte at a place of a file, as a disk or a bus does; a negative place counts from the end."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


@contextmanager
def bounded_memory(nbytes: int) -> Iterator[None]:
    """Assert that the memory of this process grows by less than so much; its former peak is forgotten."""

    def peak() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    yield
    assert peak() - before < nbytes


def in_child(work: Callable[[], object]) -> int:
    """Run a function in a forked child and return its wait status: 0 if it returned, 9 if it was killed.

    A child that does not end in two minutes gets SIGALRM.
    """
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    try:
        return os.waitpid(child, 0)[1]
    except BaseException:
        os.kill(child, signal.SIGKILL)  # of a test that took too long
        raise
