"""The conformance suite of storages.

Subclass it in your tests and return an empty folder of the storage::

    class TestMyStorage(StorageSuite):
        @pytest.fixture
        def folder(self) -> Path: ...
"""

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, NotFoundError
from tensorkeep.storage import storage_of
from tensorkeep.storage.base import MANIFEST_NAME, Storage
from tensorkeep.storage.buffers import ALIGNMENT, BufferPool
from tensorkeep.storage.parallel import Cancellation

MANIFEST = b'{"files": []}'


class StorageSuite:
    """What every `Storage` must do; subclasses provide the fixture ``folder``."""

    @pytest.fixture
    def storage(self, folder: Path) -> Iterator[Storage]:
        yield storage_of(folder)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file as a save does: in whole pages, from a buffer of a pool."""
        done: list[int] = []
        storage, pool = storage_of(path), BufferPool()
        file = storage.create(path, pool, Cancellation(), most_bytes=len(content), progress=done.append)
        try:
            file.preallocate(len(content))
            for at in range(0, len(content), ALIGNMENT):
                piece = np.frombuffer(content[at : at + ALIGNMENT], np.uint8)
                with pool.acquire(ALIGNMENT) as buffer:
                    buffer[: len(piece)] = piece
                    whole = len(piece) if storage.writes_in_order else ALIGNMENT
                    file.write(at, buffer[:whole], counts=len(piece))
            file.finish(len(content))
        finally:
            file.close()
        assert sum(done) == len(content)

    def save(self, storage: Storage, path: Path, content: bytes, *, overwrite: bool = False) -> None:
        """Save a checkpoint of one file and a manifest."""
        old = [name for name in storage.names(path) if name != MANIFEST_NAME]
        with storage.commit(
            path, directory=True, overwrite=overwrite, replaceable=lambda _: True, listed=lambda _: old
        ) as commit:
            name = f"data-{commit.save_id}.bin" if commit.save_id else "data.bin"
            self.write(commit.path / name, content)
            commit.publish(MANIFEST.replace(b"[]", b'["%s"]' % name.encode()))

    @pytest.mark.parametrize("size", [0, 1, ALIGNMENT, 5 * ALIGNMENT + 7])
    def test_a_file_is_read_as_it_was_written(self, storage: Storage, folder: Path, size: int) -> None:
        content = np.random.default_rng(size).bytes(size)
        with storage.commit(folder / "c", directory=True, overwrite=False, replaceable=lambda _: True) as commit:
            self.write(commit.path / "data", content)
            with storage.open_directory(commit.path) as directory, directory.open("data") as file:
                assert (file.size, file.read(0, size), file.path.name) == (size, content, "data")
                middle = np.zeros(max(size - 1, 0), np.uint8)
                file.read_into(min(size, 1), middle)
                assert middle.tobytes() == content[1:]
                scratch = np.empty(size + 2 * ALIGNMENT, np.uint8)
                with file.prefetch([(0, size)]):
                    assert file.fetch(0, size, scratch).tobytes() == content
                with pytest.raises(CorruptCheckpointError, match="ends at byte"):
                    file.read_into(0, np.empty(size + 1, np.uint8))

    def test_what_is_not_there(self, storage: Storage, folder: Path) -> None:
        missing = folder / "missing"
        assert (storage.mode(missing), storage.names(missing), storage.folders(missing)) == (0, [], [])
        assert storage.first_bytes(missing, 4) is None and not storage.is_taken(missing)
        with pytest.raises(NotFoundError):
            storage.open_file(missing)

    def test_a_checkpoint_appears_whole(self, storage: Storage, folder: Path) -> None:
        path = folder / "c"
        with storage.commit(path, directory=True, overwrite=False, replaceable=lambda _: True) as commit:
            self.write(commit.path / f"data-{commit.save_id or '0' * 16}.bin", b"x" * 10)
            assert storage.first_bytes(path / MANIFEST_NAME, 1) is None
            commit.publish(MANIFEST)
        assert storage.first_bytes(path / MANIFEST_NAME, 100) == MANIFEST
        assert stat.S_ISDIR(storage.mode(path)) and stat.S_ISREG(storage.mode(path / MANIFEST_NAME))
        assert storage.is_taken(path) and storage.lists(folder)
        assert (storage.folders(folder), len(storage.names(path))) == (["c"], 2)
        with storage.open_directory(path) as directory:
            assert directory.status(MANIFEST_NAME).st_size == len(MANIFEST)
            assert directory.path_of("x") == path / "x" and not directory.was_replaced()
            with pytest.raises(NotFoundError):
                directory.open("missing")

    def test_a_save_that_fails_leaves_nothing(self, storage: Storage, folder: Path) -> None:
        with (
            pytest.raises(ZeroDivisionError),
            storage.commit(folder / "c", directory=True, overwrite=False, replaceable=lambda _: True) as commit,
        ):
            self.write(commit.path / f"data-{commit.save_id or '0' * 16}.bin", b"x" * 10)
            raise ZeroDivisionError
        assert storage.names(folder) == []

    def test_replacement_is_asked_for_and_an_open_directory_notices_it(self, storage: Storage, folder: Path) -> None:
        path = folder / "c"
        self.save(storage, path, b"old" * 100)
        with pytest.raises(DestinationExistsError):
            self.save(storage, path, b"new" * 100)
        with storage.open_directory(path) as directory:
            directory.open(MANIFEST_NAME).close()
            self.save(storage, path, b"new" * 100, overwrite=True)
            assert directory.was_replaced()
        (name,) = set(storage.names(path)) - {MANIFEST_NAME}
        assert storage.first_bytes(path / name, 6) == b"newnew"

    def test_small_files(self, storage: Storage, folder: Path) -> None:
        self.save(storage, folder / "c", b"")
        storage.write_small(folder / "c" / "small", b"abc")
        with storage.open_file(folder / "c" / "small") as file:
            assert (file.read(0, 3), storage.first_bytes(file.path, 2)) == (b"abc", b"ab")

    def test_lines_are_appended_and_a_cut_line_is_ended(self, storage: Storage, folder: Path) -> None:
        self.save(storage, folder / "c", b"")
        path = folder / "log"
        storage.append_lines(path, b"a\n")
        storage.append_lines(path, b"b\nc\n")
        assert storage.first_bytes(path, 100) == b"a\nb\nc\n"
        storage.write_small(folder / "cut", b"a\nb")
        storage.append_lines(folder / "cut", b"c\n")
        assert storage.first_bytes(folder / "cut", 100) == b"a\nb\nc\n"

    def test_a_new_file_may_be_dropped(self, storage: Storage, folder: Path) -> None:
        with storage.commit(folder / "c", directory=True, overwrite=False, replaceable=lambda _: True) as commit:
            file = storage.create(commit.path / "data", BufferPool(), Cancellation(), most_bytes=100)
            file.close()
            file.close()
            assert storage.buffer_bytes(100) >= 0
            commit.publish(MANIFEST)
        assert storage.first_bytes(folder / "c" / MANIFEST_NAME, 100) == MANIFEST
