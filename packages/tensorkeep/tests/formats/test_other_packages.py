"""Formats of a package that is not installed: checkpoints, names and suffixes lead to the package to install."""

from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.errors import MissingExtraError, NotACheckpointError, UnsupportedError, installation_of
from tensorkeep.formats.base import FORMATS
from tensorkeep.testing.cases import case

REMEDY = installation_of("tensorkeep-formats")
# The first bytes of files that TensorStore and T5X write.
ARRAY, DATABASE, T5X = b'{"zarr_format": 2}', b"\x0c\xdb\x3a\x2a\0", b"\x83\xa7version\x03"


@pytest.fixture(autouse=True)
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the formats of tensorkeep alone."""
    core = {name: entry for name, entry in FORMATS._built_in.items() if entry.value.startswith("tensorkeep.")}
    loaded = {name: FORMATS.get(name) for name in core}
    for name, value in {"_built_in": core, "_entries": core, "_loaded": loaded}.items():
        monkeypatch.setattr(FORMATS, name, value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({".zarray": ARRAY}, "is a folder of Zarr arrays"),
        ({".zgroup": ARRAY, "w/.zarray": ARRAY}, "is a folder of Zarr arrays"),
        ({"zarr.json": ARRAY, "w/zarr.json": ARRAY}, "is a folder of Zarr arrays"),
        ({"w/.zarray": ARRAY}, "holds w, a folder of Zarr arrays"),
        ({"manifest.ocdbt": DATABASE}, "is an OCDBT database of arrays"),
        ({"checkpoint": T5X, "target.w/.zarray": ARRAY}, "is a checkpoint of T5X"),
        ({"checkpoint": b"\x82\xa9optimizer\x80"}, "is a checkpoint of T5X"),
        ({"checkpoint_7/checkpoint": T5X}, "holds checkpoint_7, a checkpoint of T5X"),
    ],
)
def test_a_checkpoint_of_another_package_names_it(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_bytes(content)
    for read in (tensorkeep.load, tensorkeep.info, tensorkeep.verify, tensorkeep.open):
        with case(read), pytest.raises(MissingExtraError) as caught:
            read(tmp_path / "c")
        expected = f"{message}, which the package tensorkeep-formats reads; it is not installed"
        assert (caught.value.message, caught.value.remedy, caught.value.exit_code) == (expected, REMEDY, 7)


def test_files_of_the_same_names_are_no_checkpoint_of_another_package(tmp_path: Path) -> None:
    # TensorFlow writes a text of this name.
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model-7 version"\n')
    (tmp_path / "manifest.ocdbt").write_text("")
    (tmp_path / "model").mkdir()
    with pytest.raises(NotACheckpointError, match="not a checkpoint of any known format"):
        tensorkeep.load(tmp_path)


def test_a_name_or_a_suffix_of_its_format_names_the_package(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    source = tensorkeep.save(state, tmp_path / "c").path
    for refused in (
        lambda: tensorkeep.save(state, tmp_path / "new", format="tensorstore"),
        lambda: tensorkeep.save(state, tmp_path / "new.zarr"),
        lambda: tensorkeep.save_async(state, tmp_path / "new", format="t5x"),
        lambda: tensorkeep.convert(source, tmp_path / "new.ZARR"),
        lambda: tensorkeep.convert(source, tmp_path / "new", to="t5x"),
        lambda: tensorkeep.load(source, format="tensorstore"),
    ):
        with pytest.raises(MissingExtraError, match="is in the package tensorkeep-formats, which is not") as caught:
            refused()
        assert caught.value.remedy == REMEDY
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    with pytest.raises(UnsupportedError, match="did you mean 't5x'") as unknown:
        tensorkeep.load(source, format="t5")
    assert unknown.type is UnsupportedError
