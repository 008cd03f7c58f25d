"""Types that msgspec decodes, prepared so that threads may use them at once.

msgspec looks at a struct when it is first used, and keeps what it found with the class before that is complete. A
second thread that uses the struct meanwhile ends the process with a segmentation fault (msgspec 0.22).
"""

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

_prepared: set[object] = set()
_lock = threading.RLock()  # a signal handler may use a struct while its thread prepares another one


def _reset() -> None:
    global _lock
    _lock = threading.RLock()


# A thread that held it does not exist in a forked child.
os.register_at_fork(after_in_child=_reset)


def prepared(kind: type[T]) -> type[T]:
    """Return a type that `msgspec.convert` and decoders may use in any thread.

    Examples
    --------
    >>> msgspec.convert([1, 2], prepared(tuple[int, int]))
    (1, 2)
    """
    if kind not in _prepared:
        with _lock:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind


def json_decoder(kind: type[T]) -> "msgspec.json.Decoder[T]":
    """Return a decoder of a type, made while no other thread prepares one."""
    return msgspec.json.Decoder(prepared(kind))
