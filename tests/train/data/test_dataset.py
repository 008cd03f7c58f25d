"""Opening prepared data: its attributes, and the errors for damaged and hostile files."""

import gc
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return prepare(tmp_path / "a.txt", tmp_path / "data").path


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "data.json").read_bytes())["body"]
    return body


def put(folder: Path, body: object) -> None:
    (folder / "data.json").write_bytes(sealed.seal(body))


def test_dataset_attributes(data: Path) -> None:
    dataset = Dataset.open(data)
    assert dataset.vocab_size == len(set(TEXT)) == dataset.tokenizer.vocab_size
    assert dataset.train.dtype == np.uint16
    assert dataset.tokenizer.decode(dataset.train) + dataset.tokenizer.decode(dataset.validation) == TEXT
    assert dataset.description["source"]["spec"].endswith("a.txt")
    assert dataset.description["tokenizer"] == "char"


def test_arrays_are_mapped_and_read_only(data: Path) -> None:
    dataset = Dataset.open(data)
    for array in (dataset.train, dataset.validation):
        assert type(array) is np.ndarray
        assert isinstance(array.base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def descriptors(folder: Path) -> int:
    """Return how many descriptors of this process are open on a folder or what is in it."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            targets.append(str(entry.readlink()))
    return sum(target.startswith(str(folder.resolve())) for target in targets)


def test_only_the_maps_hold_files_open(data: Path) -> None:
    dataset = Dataset.open(data, verify=True)
    assert descriptors(data) == 2
    del dataset
    assert descriptors(data) == 0
    (data / "validation.bin").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        Dataset.open(data)
    gc.collect()
    assert descriptors(data) == 0


def test_fingerprint_depends_on_tokens_and_tokenizer_only(data: Path, tmp_path: Path) -> None:
    first = Dataset.open(data).fingerprint
    (tmp_path / "b.txt").write_text(TEXT)
    (tmp_path / "c.txt").write_text(TEXT + "x")
    (tmp_path / "d.txt").write_text(TEXT[::-1])
    (tmp_path / "e.txt").write_text(TEXT.replace("q", "Q"))
    fingerprints = [Dataset.open(prepare(tmp_path / f"{n}.txt", tmp_path / n).path).fingerprint for n in "bcde"]
    assert fingerprints[0] == first
    assert len({first, *fingerprints}) == 4
    assert Dataset.open(prepare(data.parent / "a.txt", tmp_path / "f", validation=0.2).path).fingerprint != first


def test_verifying_reads_every_byte(data: Path) -> None:
    calls: list[tuple[int, int]] = []
    Dataset.open(data, verify=True, progress=lambda done, total: calls.append((done, total)))
    nbytes = 2 * len(TEXT)
    assert calls[-1] == (nbytes, nbytes)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_a_flipped_bit_is_found_when_verifying(data: Path, name: str) -> None:
    content = bytearray((data / name).read_bytes())
    content[-2] ^= 1
    (data / name).write_bytes(content)
    Dataset.open(data)
    with pytest.raises(CorruptCheckpointError, match=f"{name}: its checksum is wrong"):
        Dataset.open(data, verify=True)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_files_that_are_cut_missing_or_links_are_refused(data: Path, name: str) -> None:
    content = (data / name).read_bytes()
    for changed in (content[:-2], content[:-1], content + b"\0\0", b""):
        (data / name).write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=f"holds {len(changed):,} bytes, not {len(content):,}"):
            Dataset.open(data)
    (data / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{name}: the file is missing"):
        Dataset.open(data)
    (data.parent / "far.bin").write_bytes(content)
    (data / name).symlink_to(data.parent / "far.bin")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        Dataset.open(data)
    (data / name).unlink()
    os.mkfifo(data / name)
    with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
        Dataset.open(data)


def test_every_damaged_byte_of_the_json_is_found(data: Path) -> None:
    content = (data / "data.json").read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x20
        (data / "data.json").write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match="its checksum is wrong"):
            Dataset.open(data)
    for cut in (0, 5, len(content) // 2, len(content) - 1):
        (data / "data.json").write_bytes(content[:cut])
        with pytest.raises(CorruptCheckpointError):
            Dataset.open(data)


def test_other_folders_are_not_prepared_data(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotACheckpointError) as caught:
            Dataset.open(path)
        assert caught.value.exit_code == 5
    with pytest.raises(NotACheckpointError, match=r"holds no data\.json") as caught:
        Dataset.open(tmp_path)
    assert caught.value.remedy is not None
    assert "tensorkeep data prepare" in caught.value.remedy


def test_later_layout_version_is_unsupported_not_corrupt(data: Path) -> None:
    put(data, {**body_of(data), "version": 3, "new": "thing"})
    with pytest.raises(UnsupportedError, match="has version 3 of the layout"):
        Dataset.open(data)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.pop(key)


def with_value(value: Any, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


HOSTILE = {
    "no format": without("format"),
    "another format": with_value("tensorkeep", "format"),
    "no version": without("version"),
    "version zero": with_value(0, "version"),
    "a version of text": with_value("1", "version"),
    "a huge version of text": with_value(True, "version"),
    "no splits": with_value({}, "splits"),
    "splits of another name": with_value({"../../etc/passwd": {}}, "splits"),
    "one split": lambda body: body["splits"].pop("validation"),
    "one split more": lambda body: body["splits"].update(test=body["splits"]["train"]),
    "no tokens": with_value(0, "splits", "train", "tokens"),
    "negative tokens": with_value(-1, "splits", "train", "tokens"),
    "one token more": lambda body: body["splits"]["train"].update(tokens=body["splits"]["train"]["tokens"] + 1),
    "huge tokens": with_value(2**52, "splits", "train", "tokens"),
    "impossible tokens": with_value(2**63 - 1, "splits", "train", "tokens"),
    "tokens of text": with_value("9", "splits", "train", "tokens"),
    "fractional tokens": with_value(1.5, "splits", "train", "tokens"),
    "a digest of something else": with_value("x" * 16, "splits", "train", "xxh3_64"),
    "a long digest": with_value("0" * 17, "splits", "train", "xxh3_64"),
    "another dtype": with_value("uint32", "dtype"),
    "a signed dtype": with_value("int16", "dtype"),
    "an object dtype": with_value("O", "dtype"),
    "a smaller vocabulary": with_value(3, "vocab_size"),
    "no vocabulary": with_value(0, "vocab_size"),
    "a negative vocabulary": with_value(-5, "vocab_size"),
    "a huge vocabulary": with_value(2**60, "vocab_size"),
    "no tokenizer": without("tokenizer"),
    "a tokenizer of no kind": with_value({}, "tokenizer"),
    "a tokenizer of another kind": with_value({"kind": "os.system"}, "tokenizer"),
    "a byte tokenizer": with_value({"kind": "byte", "end_of_document": False}, "tokenizer"),
    "a tokenizer of text": with_value("char", "tokenizer"),
    "fewer characters": with_value("abc", "tokenizer", "characters"),
    "no source": without("source"),
    "negative bytes": with_value(-1, "source", "bytes"),
    "a list": with_value([], "source"),
    "fraction given as text": with_value("0.1", "validation"),
    "a negative seed": with_value(-1, "seed"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_json_is_refused(data: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = body_of(data)
    change(body)
    put(data, body)
    with pytest.raises(TensorkeepError) as caught:
        Dataset.open(data)
    assert type(caught.value) is CorruptCheckpointError
    assert caught.value.path is not None
    assert caught.value.path.startswith(str(data))


def test_body_that_is_not_an_object_is_refused(data: Path) -> None:
    for body in ([], "x", None, 5):
        put(data, body)
        with pytest.raises(CorruptCheckpointError):
            Dataset.open(data)


def test_tokens_beyond_the_vocabulary_are_found_when_verifying(data: Path) -> None:
    body = body_of(data)
    tokens = np.fromfile(data / "train.bin", "<u2")
    tokens[5] = body["vocab_size"]
    tokens.tofile(data / "train.bin")
    body["splits"]["train"]["xxh3_64"] = sealed.digest(tokens)
    put(data, body)
    with pytest.raises(CorruptCheckpointError, match=rf"train\.bin: holds the token {body['vocab_size']}, and"):
        Dataset.open(data, verify=True)


def test_undecodable_source_name_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff.txt")
    path.write_text(TEXT)
    prepared = prepare(path, tmp_path / "data")
    assert prepared.description["source"]["spec"].endswith(r"a\xff.txt")
