"""Files of torch.save: never executed, verified by CRC-32, and loadable by torch."""

import collections
import dataclasses
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats.base import OpenSettings, WriteSettings
from tensorkeep.formats.torch_file import FORMAT
from tensorkeep.state.tree import flatten
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference, same
from tensorkeep.testing.format_suite import load, noise, training_state


def save(state: Any, path: Path, **settings: Any) -> None:
    FORMAT.write(flatten(state), path, WriteSettings(threads=2, **settings))


def read(path: Path, *, verify: bool = True) -> Any:
    with FORMAT.open(path, OpenSettings(verify=verify)) as reader:
        return load(reader)


def rezip(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """Rewrite the zip file with its list of (name, content) changed by ``change``."""
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in change(records):
            new.writestr(name, content)


def with_pickle(path: Path, pickled: bytes) -> Path:
    torch.save({"w": torch.zeros(3)}, path)
    rezip(path, lambda records: [(n, pickled if n.endswith("/data.pkl") else c) for n, c in records])
    return path


@dataclasses.dataclass
class RunsOnLoad:
    command: str

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class TestTorch:
    def test_torch_loads_saved_files_and_progress_ends_at_the_total(self, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        save(training_state(), tmp_path / "x.pt", progress=lambda *counts: seen.append(counts))
        assert seen == sorted(seen) and {total for _, total in seen} == {seen[-1][0]}
        for mapped in (False, True):
            found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mapped)
            assert difference(training_state(), found) is None
            assert found["model"]["embed"] is found["model"]["head"]

    def test_files_written_by_torch_load_exactly(self, tmp_path: Path) -> None:
        state = {**training_state(), "view": torch.arange(100)[10:20], "sizes": torch.Size([1, 2])}
        torch.save(state, tmp_path / "x.pt")
        assert difference(state, read(tmp_path / "x.pt")) is None
        assert tensorkeep.load(tmp_path / "x.pt")["step"] == 2**70

    def test_views_of_one_memory_with_two_dtypes_and_a_row_without_its_matrix_round_trip(self, tmp_path: Path) -> None:
        floats = noise("float32", 8)
        state = {"floats": floats, "bits": floats.view(torch.int32), "row": torch.zeros(1000, 1000)[3]}
        save(state, tmp_path / "x.pt")
        assert same(read(tmp_path / "x.pt"), state)
        assert (tmp_path / "x.pt").stat().st_size < 14_000


def test_states_that_torch_could_not_load_are_refused(tmp_path: Path) -> None:
    tracked = torch.tensor(30.0).to(torch.float8_e4m3fn).requires_grad_()
    pair = collections.namedtuple("Pair", "a b")(1, 2)
    cases: list[tuple[Any, dict[str, Any], type[TensorkeepError], str, str | None]] = [
        *(
            ({"value": value}, {}, UnsupportedError, "without running code", None)
            for value in (range(3), frozenset([1]), pair)
        ),
        *(({"a": {"b": x}}, {}, tensorkeep.UnsupportedLeafError, "numpy", "a.b") for x in (np.zeros(3), np.float32(1))),
        ({"a": tracked}, {}, UnsupportedError, r"torch.load would fail .*in-place operation", None),
        ({}, {"compression": "lossless"}, UnsupportedError, "compress", None),
        ({}, {"metadata": {"a": 1}}, UnsupportedError, "metadata", None),
    ]
    for state, settings, error, words, name in cases:
        with case(f"{state} {settings}"):
            with pytest.raises(error, match=words) as caught:
                save(state, tmp_path / "x.pt", **settings)
            assert name in (None, caught.value.name)
    assert list(tmp_path.iterdir()) == []
    save({"a": tracked.detach()}, tmp_path / "x.pt")


def test_pickle_that_calls_the_shell_is_refused_and_not_executed(tmp_path: Path) -> None:
    path, witness = tmp_path / "evil.pth", tmp_path / "witness"
    evil = {"w": torch.zeros(3), "x": RunsOnLoad(f"touch {witness}")}
    for kind in ("zip", "legacy", "bare"):
        if kind == "bare":
            path.write_bytes(pickle.dumps(evil["x"]))
        else:
            torch.save(evil, path, _use_new_zipfile_serialization=kind == "zip")
        with case(kind):
            assert FORMAT.recognises(path)
            for load_it in (read, tensorkeep.load):
                with pytest.raises(UnsupportedError, match="system" if kind == "zip" else "run") as caught:
                    load_it(path)
                assert caught.value.remedy
            assert not witness.exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tensors_of_torchscript_archives_and_of_files_before_torch_1_6_are_read(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).eval()
    torch.jit.trace(module, torch.ones(1, 2)).save(tmp_path / "script.pt")  # type: ignore[no-untyped-call]
    state = {**training_state(), "view": torch.arange(100)[10:20], "none": torch.zeros(0), "p": torch.nn.Parameter()}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, expected in (("script.pt", dict(module.state_dict())), ("old.pt", state)):
        found = tensorkeep.load(tmp_path / name)
        assert same({key: found[key] for key in expected}, expected), name
        tensorkeep.convert(tmp_path / name, tmp_path / f"{name}.native")
        assert same(tensorkeep.load(tmp_path / f"{name}.native"), found)
    assert "values that are no tensors" in tensorkeep.info(tmp_path / "script.pt").details["torchscript"]
    tensorkeep.load(tmp_path / "script.pt", into=module)
    torch.jit.freeze(torch.jit.script(module)).save(tmp_path / "frozen.pt")  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match="is a frozen TorchScript module: its weights are constants"):
        tensorkeep.load(tmp_path / "frozen.pt")
    whole = (tmp_path / "old.pt").read_bytes()
    at = whole.rindex((100).to_bytes(8, "little"))
    for content, error, words in (
        (whole * 2, UnsupportedError, "holds another save"),
        (whole + b"x", UnsupportedError, "what no tensor uses after the first save, 1 bytes"),
        (pickle.dumps({}), UnsupportedError, "bare Python pickle"),
        (pickle.dumps(bytearray(99), protocol=5), UnsupportedError, "bare Python pickle"),
        (whole[:at] + b"x" + whole[at + 1 :], CorruptCheckpointError, "another length than the pickle says"),
        *((whole[:n], CorruptCheckpointError, "its pickle is damaged") for n in (3, 30, 100, 500, len(whole) - 1)),
    ):
        (tmp_path / "changed.pt").write_bytes(content)
        with case(words), pytest.raises(error, match=words):
            tensorkeep.load(tmp_path / "changed.pt")
    with pytest.raises(UnsupportedError, match="cannot be mapped"):
        tensorkeep.load(tmp_path / "old.pt", mmap=True)


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
        torch.save({"w": torch.ones(2), "mask": torch.full((300,), 7.5).to_sparse()}, tmp_path / "y.pt")
        assert tensorkeep.verify(tmp_path / "y.pt")
        self.flip(tmp_path / "y.pt", struct.pack("<f", 7.5) * 300)
        assert "which no tensor of the state uses" in tensorkeep.verify(tmp_path / "y.pt").problems[0].message

    def test_checksum_of_the_pickle_is_checked_before_unpickling(self, tmp_path: Path) -> None:
        save({"a_key_of_the_state": 1}, tmp_path / "x.pt")
        self.flip(tmp_path / "x.pt", b"a_key_of_the_state")
        with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
            read(tmp_path / "x.pt", verify=False)

    def test_files_without_checksums_are_read_and_reported_as_unverifiable(self, tmp_path: Path) -> None:
        state = {"w": noise("uint8", 500)}
        for write in (torch.save, tensorkeep.save):
            path = tmp_path / f"{write.__module__}.pt"
            torch.serialization.set_crc32_options(False)
            try:
                write(state, path)
            finally:
                torch.serialization.set_crc32_options(True)
            with case(path.name), FORMAT.open(path, OpenSettings()) as reader:
                assert reader.verifiable is None
                assert "not written" in reader.details["crc32"]
                assert difference(state, load(reader)) is None
                assert (report := tensorkeep.verify(path)) and report.checked is None


Records = list[tuple[str, bytes]]

STORED = zipfile.ZIP_STORED
RECORDS: dict[str, tuple[Callable[[Records], Records], int, type[TensorkeepError], str | None]] = {
    "a record twice": (lambda rs: [*rs, *(r for r in rs if "data/0" in r[0])], STORED, CorruptCheckpointError, "twice"),
    "a missing storage": (lambda rs: [r for r in rs if "data/0" not in r[0]], STORED, CorruptCheckpointError, None),
    "a storage cut short": (
        lambda records: [(name, data[:-400] if name.endswith("data/0") else data) for name, data in records],
        *(STORED, CorruptCheckpointError, "CRC-32"),
    ),
    # If each of many records claimed the length of the largest, checking them would take very long.
    "storages that claim more than the file": (
        lambda records: [(name, data[:10] if name.endswith("data/0") else data) for name, data in records],
        *(STORED, CorruptCheckpointError, "its storages claim"),
    ),
    "two folders": (lambda rs: [*rs, ("b/data.pkl", b"N.")], STORED, UnsupportedError, "several files .*/, b/"),
    "another compression": (lambda records: records, zipfile.ZIP_BZIP2, UnsupportedError, "by method 12"),
    "no pickle": (lambda records: records[1:], STORED, NotACheckpointError, r"that holds data\.pkl"),
}


DOUBLED = b"K\1" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))  # a tuple of 2**60 numbers
LONG, MANY = b"(X\0\x90\1\0" + b"a" * 102_400 + b"q\1", 20_000
FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"
HOSTILE = {
    "what .* returns": DOUBLED + b")R",
    "in another encoding": b"c_codecs\nencode\nX\1\0\0\0a" + DOUBLED + b"\x86R",
    r"calls x\.y": b"]ccollections\nOrderedDict\n)R}" + DOUBLED + b"K\1sbacx\ny\na",
    "has no class": FROM_TYPE + b"(K\1" + DOUBLED + b")}tR",
    "an array of the class": b"cnumpy.core.multiarray\n_reconstruct\n" + DOUBLED + b"\x85R)b",
    "has no dtype": b"cnumpy.core.multiarray\nscalar\n" + DOUBLED + b")RK\1\x86R",
    "a storage has no key": b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nIntStorage\n%bNK\1tQK\0))tR"
    % DOUBLED,
    "save each": b"}(cx\n" + b"y" * 200 + b"\nq\0K\1" + b"h\0K\1" * MANY + b"u",
    "save each once": LONG + b"c_codecs\nencode\nq\2h\1X\6\0\0\0latin1\x86q\3" + b"h\2h\3R" * MANY + b"l",
    "the same values": LONG
    + b"cnumpy\ndtype\nX\2\0\0\0u1\x85Rq\2cnumpy.core.numeric\n_frombuffer\nq\3(c_codecs\nencode\nh\1"
    + b"X\6\0\0\0latin1\x86Rh\2J\0\x90\1\0\x85X\1\0\0\0Ctq\4%bl" % (b"h\3h\4R" * MANY),
    "nested deeper": FROM_TYPE + b"q\0" + b"(h\0ctorch\nTensor\n" * 3000 + b")" + b"}t" * 3000 + b"R",
}
"""Pickles that would take for ever, or all memory, by the words of their errors."""


class TestDamage:
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_other_records_are_refused(self, tmp_path: Path) -> None:
        for label, (change, compression, error, words) in RECORDS.items():
            save({"w": noise("uint8", 4000), "v": noise("uint8", 8000, seed=1)}, tmp_path / label)
            rezip(tmp_path / label, change, compression)
            with case(label), pytest.raises(error, match=words):
                read(tmp_path / label)

    def test_what_is_not_a_zip_with_a_pickle_is_refused(self, tmp_path: Path) -> None:
        for content in (b"", b"PK", b"PK\3\4", b"PK\3\4" + bytes(100), b"\x93hello" * 10):
            (tmp_path / "x.pt").write_bytes(content)
            assert not FORMAT.recognises(tmp_path / "x.pt"), content
            with case(content), pytest.raises(CorruptCheckpointError):
                read(tmp_path / "x.pt")
        for path in (tmp_path / "missing.pt", tmp_path):
            assert not FORMAT.recognises(path)
            with pytest.raises(NotACheckpointError):
                read(path)

    def test_record_larger_than_the_file_is_refused(self, tmp_path: Path) -> None:
        save({"w": noise("uint8", 500)}, tmp_path / "x.pt")
        rezip(tmp_path / "x.pt", lambda records: records)
        data = (tmp_path / "x.pt").read_bytes()
        entry = data.rindex(b"PK\1\2", 0, data.rindex(b"data/0"))
        sizes = struct.pack("<II", 2**31, 2**31)
        (tmp_path / "x.pt").write_bytes(data[: entry + 20] + sizes + data[entry + 28 :])
        with pytest.raises(CorruptCheckpointError, match="claim"):
            read(tmp_path / "x.pt")

    def test_malformed_pickles_are_refused(self, tmp_path: Path) -> None:
        deep = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
        cut = [b"", b".", b"\x80\x02", b"\x80\x02}", b"\x80\x04\x95", b"\x80\x02(.", b"\x80\x02X\xff\xff\xff\x7fa."]
        for pickled in (*cut, b"\x80\x02K\x01Q."):
            path = with_pickle(tmp_path / "x.pt", pickled)
            with case(pickled[:20]):
                with pytest.raises(TensorkeepError) as caught:
                    read(path)
                assert caught.value.path == str(path)
        assert read(with_pickle(tmp_path / "x.pt", b"N.")) is None
        with pytest.warns(UserWarning, match="nested deeper than 128"):
            tensorkeep.load(with_pickle(tmp_path / "x.pt", deep))

    @pytest.mark.parametrize("words", HOSTILE)
    def test_pickles_that_would_take_for_ever_or_all_memory_are_refused(self, tmp_path: Path, words: str) -> None:
        path = with_pickle(tmp_path / "x.pt", b"\x80\x02" + HOSTILE[words] + b".")
        with pytest.raises(TensorkeepError, match=words) as caught:
            tensorkeep.convert(path, tmp_path / "native", allow="numpy")
        assert caught.value.path == str(path)

    def test_containers_that_expand_exponentially_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tensorkeep.formats.torch_file.SHARED_VALUES", 10_000)
        expanding: Any = ["x"] * 10
        for _ in range(30):
            expanding = [expanding] * 10
        with pytest.raises(UnsupportedError, match="expands to more than"):
            read(with_pickle(tmp_path / "x.pt", pickle.dumps(expanding, protocol=2)))

    def test_randomly_damaged_pickles_raise_only_tensorkeep_errors(self, tmp_path: Path) -> None:
        random = np.random.default_rng(1)
        torch.save(training_state(), tmp_path / "x.pt")
        with zipfile.ZipFile(tmp_path / "x.pt") as file:
            original = next(file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))
        refused = 0
        for _ in range(100):
            pickled = bytearray(original)
            for place in random.integers(0, len(pickled), random.integers(1, 4)):
                pickled[place] = random.integers(256)
            try:
                read(with_pickle(tmp_path / "y.pt", bytes(pickled)))
            except TensorkeepError:
                refused += 1
        # Most of the damage is detected, which shows that the checks were reached.
        assert refused > 50
