"""Damaged frames: the C coder accepts only what zstandard decodes to the same bytes, and writes nothing outside."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from coder.crafted import ACCEPTED, REFUSED
from coder.oracle import Oracle, damaged, outcome, sources
from coder.planes import plane_of
from tensorkeep.codecs.coder import RUN, CompiledCoder, PythonCoder
from tensorkeep.codecs.zstd import zstd_bound


def small_frames() -> dict[str, tuple[int, bytes]]:
    """Return frames of less than 200 bytes: one stream, four, weights in an FSE stream, two blocks; by each writer."""
    frames = dict(ACCEPTED)
    planes = {
        "weights": plane_of("normal", 300),
        "few weights": plane_of("normal", 100),
        "many symbols": np.minimum(plane_of("almost noise", 200), 90),
        "two blocks": np.r_[plane_of("constant", 131_072), plane_of("normal", 300)],
    }
    for label, plane in planes.items():
        for writer in (CompiledCoder, PythonCoder):
            out = np.empty(zstd_bound(plane.size), np.uint8)
            length = writer().encode(0, plane, out, first=True)
            frames[f"{label}, {writer.__name__}"] = plane.size, out[:length].tobytes()
    return frames


@pytest.fixture
def oracle(compiled: ModuleType) -> Oracle:
    return Oracle(compiled)


@pytest.mark.parametrize("label", ACCEPTED)
def test_frames_made_by_hand_are_read(oracle: Oracle, label: str) -> None:
    count, frame = ACCEPTED[label]
    assert oracle.accepts(frame, count)


@pytest.mark.parametrize("label", REFUSED)
def test_a_field_that_lies_is_refused_or_left_to_zstandard(oracle: Oracle, label: str) -> None:
    # The decoder holds the code of another frame, which a block without a description must not use.
    assert oracle.accepts(ACCEPTED["one stream"][1], 7)
    count, frame = REFUSED[label]
    assert not oracle.accepts(frame, count)
    if count <= RUN:
        assert outcome(CompiledCoder(), frame, count) == outcome(PythonCoder(), frame, count)


def test_every_truncation_is_refused(oracle: Oracle, record_property: Any) -> None:
    for count, frame in small_frames().values():
        for length in range(len(frame)):
            assert not oracle.accepts(frame[:length], count)
        record_property("cases", len(frame))


def change_bytes(oracle: Oracle, values: range, record_property: Any) -> int:
    """Change every byte of small frames by each of the values; return how many were decoded, as by Zstandard."""
    accepted = 0
    for count, frame in small_frames().values():
        for place in range(len(frame)):
            for value in values:
                accepted += oracle.accepts(frame[:place] + bytes([frame[place] ^ value]) + frame[place + 1 :], count)
        record_property("cases", len(frame) * len(values))
    return accepted


def test_changed_bytes_are_refused_or_decode_as_by_zstandard(oracle: Oracle, record_property: Any) -> None:
    # Only damage that leaves a valid frame is compared with Zstandard.
    assert change_bytes(oracle, range(1, 256, 23), record_property) > 0


@pytest.mark.slow
def test_every_value_of_every_byte_is_refused_or_decodes_as_by_zstandard(oracle: Oracle, record_property: Any) -> None:
    assert change_bytes(oracle, range(1, 256), record_property) > 0


def test_random_damage_is_refused_or_decodes_as_by_zstandard(oracle: Oracle, record_property: Any) -> None:
    random = np.random.default_rng(0)
    coders = CompiledCoder(), PythonCoder()
    for frame, count in sources(random):
        for _ in range(8):
            each = damaged(random, frame)
            oracle.accepts(each, count)
            assert outcome(coders[0], each, count) == outcome(coders[1], each, count)
        record_property("cases", 8)
