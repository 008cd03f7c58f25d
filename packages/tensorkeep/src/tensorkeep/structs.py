"""Types for msgspec that threads may decode at once."""

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

# msgspec 0.22 analyses a struct at its first use, and attaches the analysis to the class before it is complete. A
# second thread that uses the struct meanwhile ends the process with a segmentation fault. So a lock guards the first
# use.
_prepared: set[object] = set()
_lock = threading.RLock()  # reentrant: a signal handler may use a struct while its thread prepares another one


def _reset() -> None:
    global _lock
    _lock = threading.RLock()


# The forked child has no thread that would release the lock of its parent.
os.register_at_fork(after_in_child=_reset)


def prepared(kind: type[T]) -> type[T]:
    """Return a type that `msgspec.convert` and decoders may use in any thread."""
    if kind not in _prepared:
        with _lock:
            # To make a decoder analyses the type completely.
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind


def json_decoder(kind: type[T]) -> "msgspec.json.Decoder[T]":
    return msgspec.json.Decoder(prepared(kind))
