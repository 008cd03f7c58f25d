"""The conformance suite on native, safetensors and torch files."""

from pathlib import Path

from tensorkeep.formats import native, safetensors, torch_file
from tensorkeep.testing.format_suite import FormatSuite


class TestNative(FormatSuite):
    format = native.FORMAT
    covers_every_byte = True


class TestNativeLossless(FormatSuite):
    format = native.FORMAT
    compression = "lossless"
    covers_every_byte = True


class TestTorch(FormatSuite):
    format = torch_file.FORMAT
    keeps_metadata = False
    carries_everything = False


class TestSafetensors(FormatSuite):
    format = safetensors.FORMAT
    detects_damage = False

    def destination(self, folder: Path) -> Path:
        return folder / "model.safetensors"


class TestSafetensorsLossless(TestSafetensors):
    compression = "lossless"


class TestSafetensorsSharded(FormatSuite):
    format = safetensors.FORMAT
    detects_damage = False
    options = {"shard_bytes": 2000}  # noqa: RUF012
