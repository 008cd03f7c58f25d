"""The conformance suite on every format; a thorough run flips 250 bytes of each file."""

from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from tensorkeep.formats import dcp, native, safetensors, torch_file
from tensorkeep.formats.base import FORMATS
from tensorkeep.testing.format_suite import FormatSuite, training_state
from tensorkeep_formats import t5x, tensorstore


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


@pytest.mark.coder
@pytest.mark.parametrize(
    "suite", [TestNativeLossless, TestSafetensorsLossless, TestSafetensorsSharded, TestZarr3, TestT5X, TestOcdbt]
)
def test_other_suites_pass_what_depends_on_the_way_of_writing(
    suite: type[FormatSuite], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tests of these suites are exhaustive."""
    checks = suite()
    checks.test_states_round_trip(tmp_path_factory.mktemp("states"))
    checks.test_every_torch_dtype_round_trips(tmp_path_factory.mktemp("torch"))
    checks.test_every_numpy_dtype_round_trips(tmp_path_factory.mktemp("numpy"))
    path = checks.destination(tmp_path_factory.mktemp("saved"))
    checks.save(training_state(), path)
    checks.test_shared_storage_is_restored(path)
    checks.test_a_truncated_file_never_gives_a_wrong_value(path)
    checks.check_flipped_bits(path, 5)
    checks.test_a_missing_file_is_detected(path)
    checks.test_a_failing_disk_leaves_the_old_checkpoint("pwrite", tmp_path_factory.mktemp("failing"), monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", [each for name, each in globals().items() if name.startswith("Test")])
def test_flipped_bits_are_found_or_do_no_harm(suite: type[FormatSuite], tmp_path: Path, record_property: Any) -> None:
    checks = suite()
    path = checks.destination(tmp_path)
    checks.save(training_state(), path)
    record_property("cases", checks.check_flipped_bits(path, 250))


def test_the_suffix_of_a_plug_in_chooses_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(type(safetensors.FORMAT)):  # type: ignore[misc]
        name, suffixes = "mine", (".mine",)

    assert tensorkeep.save({}, tmp_path / "a.mine").format == "native"
    monkeypatch.setattr(FORMATS, "_entries", {**FORMATS._entries, "mine": None})
    monkeypatch.setitem(FORMATS._loaded, "mine", Mine())
    assert tensorkeep.save({}, tmp_path / "b.MINE").format == "mine"
