"""Disks, object stores, and a storage in memory pass the conformance suite of storages."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any, Self

import numpy as np
import pytest
import torch

import tensorkeep
from store_servers import JumpingClock
from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, NotFoundError, StoreError
from tensorkeep.paths import StorePath
from tensorkeep.storage import STORAGES, storage_of, store_requests
from tensorkeep.storage.base import Directory, PendingCommit, SourceFile, Storage
from tensorkeep.storage.clock import use_clock
from tensorkeep.testing.equality import same
from tensorkeep.testing.storage_suite import StorageSuite


class MemoryPath(PosixPath):
    """A path below which nothing exists but in the memory of this process."""


class MemoryFile(SourceFile):
    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.size, self._content = path, len(content), content
        fields = (stat.S_IFREG | 0o600, 1, 0, 1, 0, 0, len(content), 0, 0, 0)
        self.status = os.stat_result(fields, {"st_blocks": -(-len(content) // 512)})

    def read_into(self, offset: int, out: Any) -> None:
        found = self._content[offset : offset + len(out)]
        if len(found) < len(out):
            raise CorruptCheckpointError(f"the file ends at byte {offset + len(found):,}", path=self.path)
        out[:] = np.frombuffer(found, np.uint8)

    def bypasses_cache(self, offset: int, count: int) -> bool:
        return False

    def map_private(self) -> Any:
        return np.frombuffer(self._content, np.uint8).copy()

    def close(self) -> None: ...


class MemoryDirectory(Directory):
    def __init__(self, storage: "MemoryStorage", path: Path) -> None:
        self.path, self._storage, self._found = path, storage, storage.below(path)
        if not self._found:
            raise NotFoundError("there is no such directory", path=path)

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True, one_of: int = 1) -> SourceFile:
        if name not in self._found:
            raise NotFoundError("there is no such file", path=self.path / name)
        return MemoryFile(self.path / name, self._found[name])

    def status(self, name: str) -> os.stat_result:
        return self.open(name).status

    def was_replaced(self) -> bool:
        return self._found != self._storage.below(self.path)

    def close(self) -> None: ...


class MemoryOutput:
    direct = False

    def __init__(self, storage: "MemoryStorage", path: Path, progress: Callable[[int], None]) -> None:
        self._storage, self._path, self._progress, self._content = storage, path, progress, bytearray()

    def write(self, offset: int, data: Any, memory: object = None, *, counts: int = 0) -> None:
        self._content[len(self._content) :] = bytes(max(offset + len(data) - len(self._content), 0))
        self._content[offset : offset + len(data)] = data.tobytes()
        self._progress(counts)

    def preallocate(self, size: int) -> None: ...

    def finish(self, size: int) -> None:
        self._storage.files[self._path] = bytes(self._content[:size])

    def close(self) -> None: ...


class MemoryCommit(PendingCommit):
    def __init__(self, storage: "MemoryStorage", destination: Path, overwrite: bool) -> None:
        self.destination, self.overwrite, self._storage = destination, overwrite, storage
        self.path = destination.with_name(destination.name + ".new")

    def __enter__(self) -> Self:
        if not self.overwrite and self._storage.is_taken(self.destination):
            raise DestinationExistsError("exists already", path=self.destination)
        return self

    def publish(self, manifest: bytes | None = None) -> None:
        if manifest is not None:
            self._storage.files[self.path / "manifest.json"] = manifest
        self._storage.remove(self.destination)
        for name, content in self._storage.below(self.path).items():
            self._storage.files[self.destination / name] = content

    def __exit__(self, *error: object) -> None:
        self._storage.remove(self.path)


class MemoryStorage(Storage):
    """Files in a dictionary: the smallest storage that the suite accepts."""

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}

    def below(self, path: Path) -> dict[str, bytes]:
        return {str(each.relative_to(path)): self.files[each] for each in self.files if path in each.parents}

    def remove(self, path: Path) -> None:
        for name in self.below(path):
            del self.files[path / name]

    def mode(self, path: Path, *, follow_links: bool = True) -> int:
        return stat.S_IFREG if path in self.files else stat.S_IFDIR if self.below(path) else 0

    def names(self, directory: Path) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.below(directory)})

    def folders(self, directory: Path) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.below(directory) if "/" in name})

    def first_bytes(self, path: Path, count: int) -> bytes | None:
        return self.files[path][:count] if path in self.files else None

    def is_taken(self, path: Path) -> bool:
        return self.mode(path) != 0

    def open_file(self, path: Path) -> SourceFile:
        if path not in self.files:
            raise NotFoundError("there is no such file", path=path)
        return MemoryFile(path, self.files[path])

    def open_directory(self, path: Path) -> Directory:
        return MemoryDirectory(self, path)

    def write_small(self, path: Path, content: bytes) -> None:
        self.files[path] = content

    def append_lines(self, path: Path, lines: bytes) -> None:
        content = self.files.get(path, b"")
        self.files[path] = content + (b"\n" if content and not content.endswith(b"\n") else b"") + lines

    def create(self, path: Path, pool: object, cancellation: object, **options: Any) -> MemoryOutput:
        return MemoryOutput(self, path, options.get("progress", lambda count: None))

    def check_writable(self, path: Path) -> None: ...

    def commit(self, destination: Path, *, directory: bool, **options: Any) -> PendingCommit:
        return MemoryCommit(self, destination, options["overwrite"])


class TestLocalStorage(StorageSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path


class TestObjectStorage(StorageSuite):
    @pytest.fixture
    def folder(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        obstore = pytest.importorskip("obstore")
        store = obstore.store.MemoryStore()
        monkeypatch.setattr(store_requests, "_connect", lambda *arguments: store)
        with use_clock(JumpingClock()):
            yield StorePath("s3://bucket/run")

    def test_two_processes_that_append_at_once_lose_no_line(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, storage = folder / "log", storage_of(folder)
        put = store_requests.put_unless_changed
        others = [b"b\n", b"c\n"]

        def put_after_another(*arguments: Any) -> bool | None:
            if others:
                storage.write_small(path, (storage.first_bytes(path, 100) or b"") + others.pop(0))
            return put(*arguments)

        monkeypatch.setattr(store_requests, "put_unless_changed", put_after_another)
        storage.append_lines(path, b"a\n")
        assert storage.first_bytes(path, 100) == b"b\nc\na\n"

        def put_without_answer(*arguments: Any) -> None:
            put(*arguments)

        monkeypatch.setattr(store_requests, "put_unless_changed", put_without_answer)
        storage.append_lines(path, b"d\n")
        assert storage.first_bytes(path, 100) == b"b\nc\na\nd\n"

        monkeypatch.setattr(store_requests, "put_unless_changed", lambda *arguments: False)
        with pytest.raises(StoreError, match="changes faster"):
            storage.append_lines(path, b"e\n")


class TestMemoryStorage(StorageSuite):
    @pytest.fixture
    def folder(self, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setitem(STORAGES, MemoryPath, MemoryStorage())
        return MemoryPath("/memory")

    def test_a_checkpoint_is_saved_and_read_there(self, folder: Path) -> None:
        """Nothing above the interface asks what kind of storage it has."""
        state = {"w": torch.arange(5000), "step": 7}
        for compression in ("none", "lossless"):
            tensorkeep.save(state, folder / "c", compression=compression, overwrite=True)
            assert "manifest.json" in storage_of(folder).names(folder / "c")
            assert same(tensorkeep.load(folder / "c"), state)
            assert tensorkeep.verify(folder / "c").ok
