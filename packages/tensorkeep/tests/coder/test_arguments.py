"""The functions of the C extension check their arguments, release all buffers, and run in many threads at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from coder.planes import plane_of
from tensorkeep.testing.cases import case

B = bytearray  # which cannot be resized while anything holds its buffer


def out_of_line(nbytes: int) -> Any:
    return np.zeros(nbytes + 4, np.uint8)[4:]  # memory of numpy begins at a multiple of 16 bytes


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
    "an encoder of another size": ("encode_frame", lambda c: (B(c.ENCODER_BYTES - 8), B(100), B(200), True)),
    "an encoder out of line": ("encode_frame", lambda c: (out_of_line(c.ENCODER_BYTES), B(100), B(200), True)),
    "unknown instructions": ("use", lambda c: ("sse9",)),
    "a decoder of another size": ("decode_frame", lambda c: (B(c.DECODER_BYTES - 8), B(100), B(200))),
    "a decoder out of line": ("decode_frame", lambda c: (out_of_line(c.DECODER_BYTES), B(100), B(200))),
}
READ_ONLY_OR_STRIDED: dict[str, tuple[str, Callable[[ModuleType], tuple[Any, ...]]]] = {
    "a plane that is read-only": ("split", lambda c: (B(8), (B(4), bytes(4)), 0)),
    "a strided plane": ("split", lambda c: (B(8), (B(4), memoryview(B(8))[::2]), 0)),
    "a copy that is read-only": ("split", lambda c: (B(8), (B(4), B(4)), 0, bytes(8))),
    "an output that is read-only": ("merge", lambda c: ((B(4), B(4)), bytes(8), 0)),
}


def test_wrong_arguments_are_refused_and_released(extension: ModuleType) -> None:
    for label, (function, make) in (WRONG | READ_ONLY_OR_STRIDED).items():
        arguments = make(extension)
        with case(label):
            with pytest.raises(ValueError if label in WRONG else (BufferError, ValueError, TypeError)) as caught:
                getattr(extension, function)(*arguments)
            assert "coder" not in label or label.split()[1] in str(caught.value)
            for each in arguments:
                for buffer in each if isinstance(each, tuple) else [each]:
                    if isinstance(buffer, bytearray):
                        buffer.append(0)  # BufferError if the buffer is still held


def test_instructions_may_change_while_threads_code(extension: ModuleType) -> None:
    planes = [plane_of("normal", 100_000, seed) for seed in range(4)]

    def round_trip(number: int) -> bool:
        encoder, decoder = np.zeros(extension.ENCODER_BYTES, np.uint8), np.zeros(extension.DECODER_BYTES, np.uint8)
        plane = planes[number % len(planes)]
        out, back = np.empty(2 * plane.size, np.uint8), np.empty_like(plane)
        for i in range(5):
            extension.use(extension.kinds[(number + i) % len(extension.kinds)])
            length = extension.encode_frame(encoder, plane, out, i == 0)
            if not extension.decode_frame(decoder, out[:length], back) or not np.array_equal(back, plane):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(40)))
    extension.use(extension.kinds[-1])
