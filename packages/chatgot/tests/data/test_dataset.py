"""Opening prepared data: its attributes, and the errors for damaged and hostile files."""

import copy
import gc
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from faults.injection import flip_bit
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.testing.cases import case

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return prepare(tmp_path / "a.txt", tmp_path / "data").path


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "data.json").read_bytes())["body"]
    return body


def put(folder: Path, body: object) -> None:
    (folder / "data.json").write_bytes(checksummed_json.seal(body))


def test_dataset_attributes(data: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(data)
    assert dataset.vocab_size == len(set(TEXT)) == dataset.tokenizer.vocab_size
    assert dataset.tokenizer.decode(dataset.train) + dataset.tokenizer.decode(dataset.validation) == TEXT
    assert dataset.description["source"]["spec"].endswith("a.txt")
    assert dataset.description["tokenizer"] == "char"
    # The arrays are mapped, and read-only.
    for array in (dataset.train, dataset.validation):
        assert type(array) is np.ndarray and array.dtype == np.uint16
        assert isinstance(array.base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    # A name of the source that cannot be decoded stays readable.
    path = tmp_path / os.fsdecode(b"a\xff.txt")
    path.write_text(TEXT)
    assert prepare(path, tmp_path / "other").description["source"]["spec"].endswith(r"a\xff.txt")


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
    fingerprints = [Dataset.open(data).fingerprint]
    for number, text in enumerate((TEXT, TEXT + "x", TEXT[::-1], TEXT.replace("q", "Q"))):
        (tmp_path / "b.txt").write_text(text)
        fingerprints.append(Dataset.open(prepare(tmp_path / "b.txt", tmp_path / str(number)).path).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 4
    other = prepare(tmp_path / "a.txt", tmp_path / "f", validation=0.2).path
    assert Dataset.open(other).fingerprint != fingerprints[0]


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_flipped_bits_and_files_that_are_cut_missing_or_links_are_found(data: Path, name: str) -> None:
    content = (data / name).read_bytes()
    calls: list[tuple[int, int]] = []
    Dataset.open(data, verify=True, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (2 * len(TEXT), 2 * len(TEXT))
    flip_bit(data / name, -2)
    Dataset.open(data)
    with pytest.raises(CorruptCheckpointError, match=f"{name}: its checksum is wrong"):
        Dataset.open(data, verify=True)
    for changed in (content[:-2], content[:-1], content + b"\0\0", b""):
        (data / name).write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=f"holds {len(changed):,} bytes, not {len(content):,}"):
            Dataset.open(data)
    (data.parent / "far.bin").write_bytes(content)
    for message, put_there in (
        (f"{name}: the file is missing", lambda path: None),
        ("is a symbolic link", lambda path: path.symlink_to(data.parent / "far.bin")),
        ("is not a regular file", os.mkfifo),
    ):
        (data / name).unlink(missing_ok=True)
        put_there(data / name)
        with pytest.raises(CorruptCheckpointError, match=message):
            Dataset.open(data)


def test_every_damaged_byte_of_the_json_is_found(data: Path) -> None:
    path = data / "data.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content)
        flip_bit(path, place, 5)
        with case(place), pytest.raises(CorruptCheckpointError, match="its checksum is wrong"):
            Dataset.open(data)
    for cut in (0, 5, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with case(cut), pytest.raises(CorruptCheckpointError):
            Dataset.open(data)


def test_other_folders_and_later_versions_are_not_corrupt_data(tmp_path: Path, data: Path) -> None:
    for path, message in ((tmp_path, r"holds no data\.json"), (tmp_path / "none", None)):
        with pytest.raises(NotACheckpointError, match=message) as caught:
            Dataset.open(path)
        assert caught.value.exit_code == 5
        assert "tensorkeep data prepare" in str(caught.value.remedy) or not message
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
    **{f"no {name}": without(name) for name in ("format", "version", "tokenizer", "source")},
    "another format": with_value("tensorkeep", "format"),
    **{f"version {each!r}": with_value(each, "version") for each in (0, "1", True)},
    "no splits": with_value({}, "splits"),
    "splits of another name": with_value({"../../etc/passwd": {}}, "splits"),
    "one split": lambda body: body["splits"].pop("validation"),
    "one split more": lambda body: body["splits"].update(test=body["splits"]["train"]),
    **{f"tokens {n!r}": with_value(n, "splits", "train", "tokens") for n in (0, -1, 2**52, 2**63 - 1, "9", 1.5)},
    "one token more": lambda body: body["splits"]["train"].update(tokens=body["splits"]["train"]["tokens"] + 1),
    **{f"digest {each}": with_value(each, "splits", "train", "xxh3_64") for each in ("x" * 16, "0" * 17)},
    **{f"dtype {name}": with_value(name, "dtype") for name in ("uint32", "int16", "O")},
    **{f"vocabulary {size}": with_value(size, "vocab_size") for size in (3, 0, -5, 2**60)},
    **{f"tokenizer {each}": with_value(each, "tokenizer") for each in ({}, {"kind": "os.system"}, "char")},
    "a byte tokenizer": with_value({"kind": "byte", "end_of_document": False}, "tokenizer"),
    "fewer characters": with_value("abc", "tokenizer", "characters"),
    "negative bytes": with_value(-1, "source", "bytes"),
    "a list": with_value([], "source"),
    "fraction given as text": with_value("0.1", "validation"),
    "a negative seed": with_value(-1, "seed"),
}


def test_a_hostile_json_is_refused(data: Path) -> None:
    original = body_of(data)
    for name, change in [*HOSTILE.items(), *((repr(each), each) for each in ([], "x", None, 5))]:
        body = copy.deepcopy(original)
        if callable(change):
            change(body)
        put(data, body if callable(change) else change)
        with case(name):
            with pytest.raises(TensorkeepError) as caught:
                Dataset.open(data)
            assert type(caught.value) is CorruptCheckpointError
            assert str(caught.value.path).startswith(str(data))


def test_tokens_beyond_the_vocabulary_are_found_when_verifying(data: Path) -> None:
    body = body_of(data)
    tokens = np.fromfile(data / "train.bin", "<u2")
    tokens[5] = body["vocab_size"]
    tokens.tofile(data / "train.bin")
    body["splits"]["train"]["xxh3_64"] = checksummed_json.digest(tokens)
    put(data, body)
    with pytest.raises(CorruptCheckpointError, match=rf"train\.bin: holds the token {body['vocab_size']}, and"):
        Dataset.open(data, verify=True)
