"""The conformance suite on every format; a thorough run flips 250 bytes of each file."""

from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from conformance import check_flipped_bits, check_writing
from tensorkeep.formats import dcp, native, safetensors, torch_file
from tensorkeep.formats.base import FORMATS
from tensorkeep.testing.format_suite import FormatSuite


class TestNative(FormatSuite):
    format = native.FORMAT
    covers_every_byte = True


@pytest.mark.coder
@pytest.mark.exhaustive
class TestNativeLossless(TestNative):
    compression = "lossless"


class TestTorch(FormatSuite):
    format = torch_file.FORMAT
    keeps_metadata = False
    carries_everything = False


class TestSafetensors(FormatSuite):
    format = safetensors.FORMAT
    detects_damage = False

    def destination(self, folder: Path) -> Path:
        return folder / "model.safetensors"


@pytest.mark.coder
@pytest.mark.exhaustive
class TestSafetensorsLossless(TestSafetensors):
    compression = "lossless"


@pytest.mark.exhaustive
class TestSafetensorsSharded(FormatSuite):
    format = safetensors.FORMAT
    detects_damage = False
    options = {"shard_bytes": 2000}  # noqa: RUF012


class TestDcp(FormatSuite):
    format = dcp.FORMAT


@pytest.mark.coder
@pytest.mark.parametrize("suite", [TestNativeLossless, TestSafetensorsLossless, TestSafetensorsSharded])
def test_other_suites_pass_what_depends_on_the_way_of_writing(
    suite: type[FormatSuite], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tests of these suites are exhaustive."""
    check_writing(suite, tmp_path_factory, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", [each for name, each in globals().items() if name.startswith("Test")])
def test_flipped_bits_are_found_or_do_no_harm(suite: type[FormatSuite], tmp_path: Path, record_property: Any) -> None:
    check_flipped_bits(suite, tmp_path, record_property)


def test_the_suffix_of_a_plug_in_chooses_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(type(safetensors.FORMAT)):  # type: ignore[misc]
        name, suffixes = "mine", (".mine",)

    assert tensorkeep.save({}, tmp_path / "a.mine").format == "native"
    monkeypatch.setattr(FORMATS, "_entries", {**FORMATS._entries, "mine": None})
    monkeypatch.setitem(FORMATS._loaded, "mine", Mine())
    assert tensorkeep.save({}, tmp_path / "b.MINE").format == "mine"
