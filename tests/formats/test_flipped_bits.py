"""The thorough run of the conformance suite's flipped bits: 250 bytes of every file, for every format."""

from collections.abc import Callable
from pathlib import Path

import pytest

from formats import test_conformance as own
from formats.dcp import test_conformance as dcp
from formats.t5x import test_conformance as t5x
from formats.tensorstore import test_conformance as tensorstore
from tensorkeep.testing.format_states import training_state
from tensorkeep.testing.format_suite import FormatSuite

SUITES: list[type[FormatSuite]] = [
    own.TestNative,
    own.TestNativeLossless,
    own.TestTorch,
    own.TestSafetensors,
    own.TestSafetensorsLossless,
    own.TestSafetensorsSharded,
    dcp.TestDcp,
    t5x.TestT5X,
    tensorstore.TestZarr3,
    tensorstore.TestZarr2AsDocumented,
    tensorstore.TestOcdbt,
]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_flipped_bits_are_found_or_do_no_harm(
    suite: type[FormatSuite], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    checks = suite()
    path = checks.destination(tmp_path)
    checks.save(training_state(), path)
    record_property("cases", checks.check_flipped_bits(path, 250))
