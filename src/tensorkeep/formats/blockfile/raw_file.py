"""Data files of raw tensors: every offset is known before anything is written."""

import threading
from pathlib import Path

import numpy as np

from tensorkeep.formats.blockfile.data_file import DataFile, WriteContext
from tensorkeep.formats.blockfile.gather import bytes_of, copy_and_hash, slices_of, staging_bytes
from tensorkeep.formats.blockfile.notes import Description, describe
from tensorkeep.formats.blockfile.plan import BlockRecord, FilePlan
from tensorkeep.formats.sealed import digest
from tensorkeep.io.buffers import ALIGNMENT, Buffer, round_down, round_up
from tensorkeep.io.files import Bytes, DirectFile
from tensorkeep.io.objects.uploads import Upload


class RawDataFile(DataFile):
    """A data file whose tensors are stored as they are."""

    header_comes_first = True

    def __init__(self, directory: Path, plan: FilePlan, context: WriteContext) -> None:
        super().__init__(directory, plan, context)
        self._edges = _SharedPages(self.size)

    def _longest_description(self) -> Description:
        blocks = [block for task in self.tasks for block in task]
        return describe(self.plan, {block.key: BlockRecord("raw", block.nbytes) for block in blocks})

    def _create(self) -> DirectFile | Upload:
        file = super()._create()
        if isinstance(file, DirectFile):
            file.preallocate(self.size)
        else:
            file.write(0, np.frombuffer(self._header(self._longest_description(), self.header_size), np.uint8))
        return file

    def _write(self, number: int, staged: Buffer | None) -> None:
        """Write the task's blocks, except the pages shared with other tasks that are not complete yet."""
        blocks = self.tasks[number]
        begin = self.header_size + blocks[0].leaf.start + blocks[0].start
        end = begin + bytes_of(blocks)
        first = round_down(begin)
        memory = staged or self._context.pool.acquire(staging_bytes(blocks))
        with memory as buffer:
            for block, place in slices_of(blocks):
                if staged:
                    checksum = digest(buffer[place], wide=self._context.wide)
                else:
                    checksum = copy_and_hash(block, buffer[place], wide=self._context.wide)
                self.records[block.key] = BlockRecord("raw", block.nbytes, checksum)
            low, high = (begin, end) if self.in_store else self._edges.settle(begin, end, buffer)
            self._put(low, buffer[low - first : high - first], memory, end - begin)


class _SharedPages:
    """The pages in which one task ends and another begins; the task that completes a page writes it.

    A direct write covers whole pages, so two writes that cover one page would overwrite each other.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: dict[int, tuple[Bytes, int]] = {}
        self._lock = threading.Lock()

    def settle(self, begin: int, end: int, buffer: Bytes) -> tuple[int, int]:
        """Return the range of the file to write from a buffer that begins with the page of ``begin``.

        A shared page at either end is written by the task that completes it; until then its bytes are kept here.
        """
        first, low, high = round_down(begin), round_up(begin), round_down(end)
        if low > high:  # all within one page
            return (first, round_up(end)) if self._merge(first, begin, end, buffer[:ALIGNMENT]) else (first, first)
        if begin != low and self._merge(first, begin, low, buffer[:ALIGNMENT]):
            low = first
        if end != high and self._merge(high, high, end, buffer[high - first : high - first + ALIGNMENT]):
            high = round_up(end)
        return low, high

    def _merge(self, page: int, start: int, stop: int, own: Bytes) -> bool:
        """Add bytes ``start:stop`` of a page; if that completes it, copy the whole page into ``own``."""
        with self._lock:
            content, count = self._pages.get(page) or (np.zeros(ALIGNMENT, np.uint8), 0)
            content[start - page : stop - page] = own[start - page : stop - page]
            count += stop - start
            self._pages[page] = (content, count)
            if page + count < min(page + ALIGNMENT, self._size):
                return False
            own[:] = content
            return True
