"""The functions of the C extension check their arguments, release all buffers, and run in many threads at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from coder.planes import plane_of

B = bytearray  # which cannot be resized while anything holds its buffer

WRONG: dict[str, tuple[str, Callable[[ModuleType], tuple[Any, ...]]]] = {
    "no planes": ("split", lambda c: (B(8), (), 0)),
    "three planes": ("split", lambda c: (B(9), (B(3), B(3), B(3)), 0)),
    "a plane too short": ("split", lambda c: (B(8), (B(4), B(3)), 0)),
    "a plane too long": ("merge", lambda c: ((B(4), B(5)), B(8), 0)),
    "elements cut short": ("split", lambda c: (B(9), (B(4), B(4)), 0)),
    "an unknown layout": ("split", lambda c: (B(8), (B(4), B(4)), 2)),
    "a negative layout": ("merge", lambda c: ((B(4), B(4)), B(8), -1)),
    "an exponent in one byte": ("split", lambda c: (B(8), (B(8),), 1)),
    "a copy of another size": ("split", lambda c: (B(8), (B(4), B(4)), 0, B(7))),
    "an output too small": ("encode_frame", lambda c: (B(c.ENCODER_BYTES), B(100), B(115), True)),
    "an encoder of another size": ("encode_frame", lambda c: (B(100), B(100), B(200), True)),
    "unknown instructions": ("use", lambda c: ("sse9",)),
    "a decoder of another size": ("decode_frame", lambda c: (B(100), B(100), B(200))),
}


@pytest.mark.parametrize("label", WRONG)
def test_wrong_arguments_are_refused_and_released(compiled: ModuleType, label: str) -> None:
    function, make = WRONG[label]
    arguments = make(compiled)
    with pytest.raises(ValueError):
        getattr(compiled, function)(*arguments)
    for each in arguments:
        for buffer in each if isinstance(each, tuple) else [each]:
            if isinstance(buffer, bytearray):
                buffer.append(0)  # BufferError if the buffer is still held


def test_memory_that_is_read_only_or_strided_is_refused_and_released(compiled: ModuleType) -> None:
    plane, raw = bytearray(4), bytearray(8)
    for planes, copy in (
        ((plane, bytes(4)), None),
        ((plane, memoryview(bytearray(8))[::2]), None),
        ((plane, plane), bytes(8)),
    ):
        with pytest.raises((BufferError, ValueError, TypeError)):
            compiled.split(raw, planes, 0, copy)
    with pytest.raises((BufferError, TypeError)):
        compiled.merge((plane, plane), bytes(8), 0)
    plane.append(0)
    raw.append(0)


def test_instructions_may_change_while_threads_code(compiled: ModuleType) -> None:
    planes = [plane_of("normal", 100_000, seed) for seed in range(4)]

    def round_trip(number: int) -> bool:
        encoder, decoder = np.zeros(compiled.ENCODER_BYTES, np.uint8), np.zeros(compiled.DECODER_BYTES, np.uint8)
        plane = planes[number % len(planes)]
        out, back = np.empty(2 * plane.size, np.uint8), np.empty_like(plane)
        for i in range(5):
            compiled.use(compiled.kinds[(number + i) % len(compiled.kinds)])
            length = compiled.encode_frame(encoder, plane, out, i == 0)
            if not compiled.decode_frame(decoder, out[:length], back) or not np.array_equal(back, plane):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(40)))
