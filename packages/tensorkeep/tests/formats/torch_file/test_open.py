"""Opening files of torch.save: files replaced meanwhile, damaged files, and tensors larger than their storage."""

import collections
import errno
import os
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, OutOfMemoryError, StoreError
from tensorkeep.formats import torch_file
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.torch_file import FORMAT, archive
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import load, noise


def test_file_replaced_while_it_is_opened_is_read_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rival = tmp_path / "x.pt", tmp_path / "rival.pt"
    torch.save({"w": torch.zeros(100)}, path)
    torch.save({"w": torch.ones(100)}, rival)
    original = torch_file.load_untrusted
    monkeypatch.setattr(torch_file, "load_untrusted", lambda *each: rival.replace(path) and original(*each))
    with FORMAT.open(path, OpenSettings()) as opened:
        assert load(opened)["w"].sum() == 0
    monkeypatch.undo()
    assert tensorkeep.load(path)["w"].sum() == 100


def test_descriptors_are_closed_after_opening(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100)}, tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:-100])
    readers = [FORMAT.open(tmp_path / "x.pt", OpenSettings()) for _ in range(5)]
    with pytest.raises(CorruptCheckpointError):
        FORMAT.open(tmp_path / "y.pt", OpenSettings())
    assert tmp_path.resolve() not in [each.resolve().parent for each in Path("/proc/self/fd").iterdir()]
    assert len(readers) == 5


def test_missing_bytes_are_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": noise("float32", 5000)}, path)
    content = path.read_bytes()
    for lost in (1, 7, 500, 4096):
        for at in (0, 40, 1000, len(content) - lost - 30, len(content) - lost):
            path.write_bytes(content[:at] + content[at + lost :])
            with case(f"{lost} bytes at {at}"):
                with pytest.raises(CorruptCheckpointError) as caught:
                    tensorkeep.load(path, format="torch")
                assert "/proc" not in str(caught.value)
                assert not tensorkeep.verify(path, format="torch").ok


def test_failed_read_is_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.zeros(100)}, path)
    with path.open("rb") as file:
        unreadable = os.open(path, os.O_WRONLY)
        os.dup2(unreadable, file.fileno())
        os.close(unreadable)
        with pytest.raises(StoreError, match=os.strerror(errno.EBADF)):
            archive.TorchZip(file, path.stat().st_size, path)


def test_named_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    assert not FORMAT.recognises(tmp_path / "x.pt")
    with pytest.raises(NotACheckpointError):
        FORMAT.open(tmp_path / "x.pt", OpenSettings())


class TestSharedStorage:
    def test_expanded_tensor_is_verified_once_and_not_allocated(self, tmp_path: Path) -> None:
        path = tmp_path / "x.pt"
        torch.save({"huge": torch.zeros(1).expand(2**50), "w": torch.ones(5)}, path)
        info = tensorkeep.info(path)
        assert info.total.stored_bytes == 24 < path.stat().st_size
        report = tensorkeep.verify(path)
        assert (report.ok, report.tensors, report.nbytes) == (True, 2, 24)
        with pytest.raises(OutOfMemoryError, match="memory"):
            tensorkeep.load(path)
        assert tensorkeep.load(path, select="w")["w"].sum() == 5
        # Its checksum is checked.
        pattern = noise("uint8", 1000)
        torch.save({"w": pattern.expand(2**40, 1000)}, path)
        content = bytearray(path.read_bytes())
        content[content.index(bytes(pattern.tolist()))] ^= 1
        path.write_bytes(content)
        [problem] = tensorkeep.verify(path).problems
        assert (problem.name, problem.message) == ("w", "the CRC-32 of its storage is wrong")

    def test_shared_storage_is_counted_once(self, tmp_path: Path) -> None:
        path = tmp_path / "x.pt"
        whole = noise("float32", 1000)
        state = {"head": whole[:600], "tail": whole[400:], "none": whole[:0]}
        torch.save(state, path)
        assert [entry.stored_bytes for entry in tensorkeep.info(path).entries] == [4000, 0, 0]
        assert tensorkeep.verify(path).ok
        assert same(tensorkeep.load(path)["tail"], whole[400:])


def test_counter_of_a_scheduler_round_trips(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    state = {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2]).state_dict()}
    torch.save(state, tmp_path / "x.pt")
    found = tensorkeep.load(tmp_path / "x.pt")
    assert same(found, state)
    assert type(found["scheduler"]["milestones"]) is collections.Counter
    tensorkeep.save(found, tmp_path / "y.pt", format="torch")
    assert torch.load(tmp_path / "y.pt", weights_only=True) == state
