"""Files of torch.save: never executed, verified by CRC-32, and loadable by torch."""

import collections
import datetime
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    TensorkeepError,
    UnsupportedError,
    UnsupportedLeafError,
)
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.torch_file import FORMAT
from tensorkeep.formats.write import WriteSettings
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import difference, same
from tensorkeep.testing.format_states import load, noise, training_state


def save(state: Any, path: Path, **settings: Any) -> None:
    FORMAT.write(flatten(state), path, WriteSettings(threads=2, **settings))


def read(path: Path, *, verify: bool = True) -> Any:
    with FORMAT.open(path, OpenSettings(verify=verify)) as reader:
        return load(reader)


def rezip(path: Path, change: Any) -> None:
    """Rewrite the zip file with its list of (name, content) changed by ``change``."""
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in change(records):
            new.writestr(name, content)


def with_pickle(path: Path, pickled: bytes) -> Path:
    torch.save({"w": torch.zeros(3)}, path)
    rezip(path, lambda records: [(n, pickled if n.endswith("/data.pkl") else c) for n, c in records])
    return path


class RunsOnLoad:
    """An object whose pickle calls os.system, as in a malicious file."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class TestTorch:
    def test_torch_loads_saved_files(self, tmp_path: Path) -> None:
        save(training_state(), tmp_path / "x.pt")
        for mapped in (False, True):
            found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mapped)
            assert difference(training_state(), found) is None
            assert found["model"]["embed"] is found["model"]["head"]

    def test_files_written_by_torch_load_exactly(self, tmp_path: Path) -> None:
        state = {**training_state(), "view": torch.arange(100)[10:20], "sizes": torch.Size([1, 2])}
        torch.save(state, tmp_path / "x.pt")
        assert difference(state, read(tmp_path / "x.pt")) is None
        assert tensorkeep.load(tmp_path / "x.pt")["step"] == 2**70

    def test_row_of_a_matrix_is_saved_without_the_matrix(self, tmp_path: Path) -> None:
        save({"row": torch.zeros(1000, 1000)[3]}, tmp_path / "x.pt")
        assert (tmp_path / "x.pt").stat().st_size < 10_000

    def test_views_of_one_memory_with_two_dtypes_round_trip(self, tmp_path: Path) -> None:
        floats = noise("float32", 8)
        state = {"floats": floats, "bits": floats.view(torch.int32)}
        save(state, tmp_path / "x.pt")
        assert same(read(tmp_path / "x.pt"), state)

    def test_progress_ends_at_the_total(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        save(training_state(), tmp_path / "x.pt", progress=lambda done, total: seen.append((done, total)))
        done, totals = [d for d, _ in seen], {total for _, total in seen}
        assert done == sorted(done)
        assert totals == {done[-1]}


class TestRefusedOnWriting:
    @pytest.mark.parametrize(
        "value", [range(3), frozenset([1]), collections.namedtuple("Pair", "a b")(1, 2)], ids=["range", "set", "tuple"]
    )
    def test_values_that_torch_cannot_load_safely_are_refused(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(UnsupportedError, match="without running code"):
            save({"value": value}, tmp_path / "x.pt")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("value", [np.zeros(3), np.float32(1)], ids=["array", "scalar"])
    def test_numpy_values_are_refused_by_name(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(UnsupportedLeafError, match="numpy") as caught:
            save({"a": {"b": value}}, tmp_path / "x.pt")
        assert caught.value.name == "a.b"

    def test_compression_and_metadata_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="compress"):
            save({}, tmp_path / "x.pt", compression="lossless")
        with pytest.raises(UnsupportedError, match="metadata"):
            save({}, tmp_path / "x.pt", metadata={"a": 1})


class TestNeverExecuted:
    @pytest.mark.parametrize("mapped", ["zip", "legacy", "bare"])
    def test_pickle_that_calls_the_shell_is_refused_and_not_executed(self, tmp_path: Path, mapped: str) -> None:
        path, witness = tmp_path / "evil.pth", tmp_path / "witness"
        evil = {"w": torch.zeros(3), "x": RunsOnLoad(f"touch {witness}")}
        if mapped == "bare":
            path.write_bytes(pickle.dumps(evil["x"]))
        else:
            torch.save(evil, path, _use_new_zipfile_serialization=mapped == "zip")
        assert FORMAT.recognises(path)
        with pytest.raises(UnsupportedError, match="run") as caught:
            read(path)
        assert caught.value.remedy
        assert not witness.exists()
        if mapped == "zip":
            assert "system" in caught.value.message
        with pytest.raises(UnsupportedError):
            tensorkeep.load(path)
        assert not witness.exists()

    def test_class_outside_of_torch_is_refused_by_name(self, tmp_path: Path) -> None:
        torch.save({"when": datetime.timedelta(1)}, tmp_path / "x.pt")
        with pytest.raises(UnsupportedError, match=r"datetime\.timedelta"):
            read(tmp_path / "x.pt")

    def test_torchscript_is_refused(self, tmp_path: Path) -> None:
        torch.save({}, tmp_path / "x.pt")
        rezip(tmp_path / "x.pt", lambda records: [*records, (f"{records[0][0].split('/')[0]}/constants.pkl", b"")])
        with pytest.raises(UnsupportedError, match="TorchScript"):
            read(tmp_path / "x.pt")

    def test_sparse_tensor_is_refused_by_name(self, tmp_path: Path) -> None:
        torch.save({"a": {"b": torch.eye(3).to_sparse()}}, tmp_path / "x.pt")
        with pytest.raises(UnsupportedError, match="sparse") as caught:
            read(tmp_path / "x.pt")
        assert caught.value.name == "a.b"


class TestChecksums:
    def flip(self, path: Path, content: bytes) -> None:
        data = bytearray(path.read_bytes())
        data[data.index(content)] ^= 1
        path.write_bytes(data)

    def test_flipped_bit_that_torch_ignores_is_detected(self, tmp_path: Path) -> None:
        state = {"good": noise("uint8", 500, seed=1), "bad": noise("uint8", 500, seed=2)}
        save(state, tmp_path / "x.pt")
        self.flip(tmp_path / "x.pt", bytes(state["bad"].tolist()))
        assert not torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["bad"], state["bad"])
        with FORMAT.open(tmp_path / "x.pt", OpenSettings()) as reader:
            assert reader.verifiable is not None
            out = np.empty(500, np.uint8)
            reader.read("good", 0, 500, out)
            for _ in range(2):
                with pytest.raises(CorruptCheckpointError, match="CRC-32") as caught:
                    reader.read("bad", 0, 1, out[:1])
                assert caught.value.name == "bad"
        assert read(tmp_path / "x.pt", verify=False)["bad"][0] == state["bad"][0] ^ 1

    def test_checksum_of_the_pickle_is_checked_before_unpickling(self, tmp_path: Path) -> None:
        save({"a_key_of_the_state": 1}, tmp_path / "x.pt")
        self.flip(tmp_path / "x.pt", b"a_key_of_the_state")
        with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
            read(tmp_path / "x.pt", verify=False)

    def test_files_without_checksums_are_read_and_reported_as_unverifiable(self, tmp_path: Path) -> None:
        state = {"w": noise("uint8", 500)}
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(state, tmp_path / "x.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        with FORMAT.open(tmp_path / "x.pt", OpenSettings()) as reader:
            assert reader.verifiable is None
            assert "not written" in reader.details["crc32"]
            assert difference(state, load(reader)) is None


class TestDamage:
    @pytest.mark.parametrize("content", [b"", b"PK", b"PK\3\4", b"PK\3\4" + bytes(100), b"hello world" * 10])
    def test_file_other_than_a_zip_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.pt").write_bytes(content)
        assert not FORMAT.recognises(tmp_path / "x.pt")
        with pytest.raises(CorruptCheckpointError):
            read(tmp_path / "x.pt")

    def test_missing_path_and_directory_are_not_checkpoints(self, tmp_path: Path) -> None:
        for path in (tmp_path / "missing.pt", tmp_path):
            assert not FORMAT.recognises(path)
            with pytest.raises(NotACheckpointError):
                read(path)

    def test_zip_without_a_pickle_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
            file.writestr("readme.txt", "hello")
        assert not FORMAT.recognises(tmp_path / "x.zip")
        with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
            read(tmp_path / "x.zip")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_duplicate_record_is_refused(self, tmp_path: Path) -> None:
        save({"w": noise("uint8", 50)}, tmp_path / "x.pt")
        rezip(tmp_path / "x.pt", lambda records: [*records, *(r for r in records if r[0].endswith("/0"))])
        with pytest.raises(CorruptCheckpointError, match="twice"):
            read(tmp_path / "x.pt")

    def test_compressed_record_is_refused(self, tmp_path: Path) -> None:
        """A zip bomb is refused before anything is inflated."""
        save({"w": torch.zeros(1000)}, tmp_path / "x.pt")
        with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
            for name in old.namelist():
                new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
        with pytest.raises(CorruptCheckpointError, match="compressed"):
            read(tmp_path / "y.pt")

    def test_record_larger_than_the_file_is_refused(self, tmp_path: Path) -> None:
        save({"w": noise("uint8", 500)}, tmp_path / "x.pt")
        rezip(tmp_path / "x.pt", lambda records: records)
        data = (tmp_path / "x.pt").read_bytes()
        entry = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
        sizes = struct.pack("<II", 2**31, 2**31)
        (tmp_path / "x.pt").write_bytes(data[: entry + 20] + sizes + data[entry + 28 :])
        with pytest.raises(CorruptCheckpointError, match="claim"):
            read(tmp_path / "x.pt")

    def test_missing_storage_is_refused(self, tmp_path: Path) -> None:
        save({"w": noise("uint8", 500)}, tmp_path / "x.pt")
        rezip(tmp_path / "x.pt", lambda records: [r for r in records if not r[0].endswith("data/0")])
        with pytest.raises(CorruptCheckpointError):
            read(tmp_path / "x.pt")

    def test_truncated_storage_is_refused(self, tmp_path: Path) -> None:
        save({"w": noise("uint8", 500), "v": noise("uint8", 500, seed=1)}, tmp_path / "x.pt")
        rezip(tmp_path / "x.pt", lambda records: [(n, c[:100] if n.endswith("data/0") else c) for n, c in records])
        with pytest.raises(CorruptCheckpointError):
            read(tmp_path / "x.pt")

    @pytest.mark.parametrize(
        "pickled",
        [b"", b".", b"\x80\x02", b"\x80\x02}", b"\x80\x04\x95", b"\x80\x02(.", b"N.", b"\x80\x02K\x01Q."]
        + [b"\x80\x02X\xff\xff\xff\x7fa.", b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."],
    )
    def test_malformed_pickles_are_refused(self, tmp_path: Path, pickled: bytes) -> None:
        path = with_pickle(tmp_path / "x.pt", pickled)
        try:
            assert read(path) is None  # b"N." is a pickle of None
        except TensorkeepError as error:
            assert error.path == str(path)

    def test_pickle_that_expands_exponentially_is_refused(self, tmp_path: Path) -> None:
        state: Any = ["x"] * 10
        for _ in range(30):
            state = [state] * 10
        pickled = io.BytesIO()
        pickle.Pickler(pickled, protocol=2).dump(state)
        with pytest.raises(UnsupportedError, match="expands to more than"):
            read(with_pickle(tmp_path / "x.pt", pickled.getvalue()))

    def test_container_that_contains_itself_is_refused(self, tmp_path: Path) -> None:
        state: list[Any] = []
        state.append(state)
        with pytest.raises(UnsupportedError):
            read(with_pickle(tmp_path / "x.pt", pickle.dumps(state, protocol=2)))

    def test_randomly_damaged_pickles_raise_only_tensorkeep_errors(self, tmp_path: Path) -> None:
        random = np.random.default_rng(1)
        torch.save(training_state(), tmp_path / "x.pt")
        with zipfile.ZipFile(tmp_path / "x.pt") as file:
            original = next(file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))
        refused = 0
        for _ in range(200):
            pickled = bytearray(original)
            for place in random.integers(0, len(pickled), random.integers(1, 4)):
                pickled[place] = random.integers(256)
            try:
                read(with_pickle(tmp_path / "y.pt", bytes(pickled)))
            except TensorkeepError:
                refused += 1
        # Most of the damage is detected, which shows that the checks were reached.
        assert refused > 100


def test_tensor_that_torch_load_cannot_restore_is_refused(tmp_path: Path) -> None:
    tracked = torch.tensor(30.0).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"torch.load would fail .*in-place operation"):
        tensorkeep.save({"a": tracked}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []
    tensorkeep.save({"a": tracked.detach()}, tmp_path / "a.pt")
