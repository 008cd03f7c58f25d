"""The conformance suite on TensorStore's and T5X's formats; a thorough run flips 250 bytes of each file."""

from pathlib import Path
from typing import Any

import pytest

from conformance import check_flipped_bits, check_writing
from tensorkeep.testing.format_suite import FormatSuite
from tensorkeep_formats import t5x, tensorstore


@pytest.mark.exhaustive
class TestT5X(FormatSuite):
    # T5X's default, float32, does not keep the bits of a NaN, which random elements contain.
    format = t5x.FORMAT
    options = {"dtype": "keep"}  # noqa: RUF012


@pytest.mark.exhaustive
@pytest.mark.xdist_group("conformance of tensorstore")
class TestZarr3(FormatSuite):
    """The default: raw, with a CRC-32C of every chunk."""

    format = tensorstore.FORMAT
    covers_every_byte = True


@pytest.mark.exhaustive
class TestZarr2AsDocumented(FormatSuite):
    """Chunks of 4,096 elements, the key ``compressor`` left out, one array after the other; without checksums."""

    format = tensorstore.FORMAT
    options = {"zarr": 2, "compressor": "as-documented", "chunk": 4096, "in_flight": "one"}  # noqa: RUF012
    detects_damage = False


@pytest.mark.exhaustive
class TestOcdbt(FormatSuite):
    format = tensorstore.FORMAT
    options = {"kvstore": "ocdbt"}  # noqa: RUF012


@pytest.mark.parametrize("suite", [TestZarr3, TestT5X, TestOcdbt])
def test_suites_pass_what_depends_on_the_way_of_writing(
    suite: type[FormatSuite], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tests of these suites are exhaustive."""
    check_writing(suite, tmp_path_factory, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", [each for name, each in globals().items() if name.startswith("Test")])
def test_flipped_bits_are_found_or_do_no_harm(suite: type[FormatSuite], tmp_path: Path, record_property: Any) -> None:
    check_flipped_bits(suite, tmp_path, record_property)
