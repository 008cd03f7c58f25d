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


def test_frames_made_by_hand_are_read_and_a_field_that_lies_is_refused_or_left_to_zstandard(oracle: Oracle) -> None:
    for label, (count, frame) in ACCEPTED.items():
        assert oracle.accepts(frame, count), label
    coders = CompiledCoder(), PythonCoder()
    for label, (count, frame) in REFUSED.items():
        # The decoder holds the code of another frame, which a block without a description must not use.
        assert oracle.accepts(ACCEPTED["one stream"][1], 7)
        assert not oracle.accepts(frame, count), label
        if count <= RUN:
            assert outcome(coders[0], frame, count) == outcome(coders[1], frame, count), label


def test_every_truncation_is_refused(oracle: Oracle, record_property: Any) -> None:
    for count, frame in small_frames().values():
        for length in range(len(frame)):
            assert not oracle.accepts(frame[:length], count)
        record_property("cases", len(frame))


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_changed_bytes_are_refused_or_decode_as_by_zstandard(oracle: Oracle, step: int, record_property: Any) -> None:
    values, accepted = range(1, 256, step), 0
    for count, frame in small_frames().values():
        for place in range(len(frame)):
            for value in values:
                accepted += oracle.accepts(frame[:place] + bytes([frame[place] ^ value]) + frame[place + 1 :], count)
        record_property("cases", len(frame) * len(values))
    assert accepted > 0  # only damage that leaves a valid frame is compared with Zstandard


def test_random_damage_is_refused_or_decodes_as_by_zstandard(oracle: Oracle, record_property: Any) -> None:
    random = np.random.default_rng(0)
    coders = CompiledCoder(), PythonCoder()
    for frame, count in sources(random):
        for _ in range(4):
            each = damaged(random, frame)
            oracle.accepts(each, count)
            assert outcome(coders[0], each, count) == outcome(coders[1], each, count)
        record_property("cases", 4)
