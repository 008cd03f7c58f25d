"""Opening prepared data: checked, memory-mapped and read-only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike
from tensorkeep.formats.sealed import new_hasher
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import store_error
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.io.source_file import SourceFile
from tensorkeep.train.data.layout import Layout, file_name, read_layout
from tensorkeep.train.data.splits import SPLITS, TRAIN, VALIDATION
from tensorkeep.train.data.tokenizers.base import Tokenizer, Tokens

_VERIFIED_AT_ONCE = 1 << 22
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prepared data: tokens in memory-mapped files, and the tokenizer that made them.

    Attributes
    ----------
    path : Path
        Its folder.
    train, validation : array of uint16 or uint32
        1-D and read-only. They are mapped from the files: only what is used is read.
    tokenizer : Tokenizer
    fingerprint : str
        16 hexadecimal digits that depend on every token and on the tokenizer, and on nothing else.
    about : dict
        The contents of ``data.json`` as plain values, with the name of the tokenizer and the fingerprint.
    """

    path: Path
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    about: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the tokenizer; every id is below it."""
        return self.tokenizer.vocab_size

    @classmethod
    def open(
        cls,
        folder: PathLike,
        *,
        verify: bool = False,
        progress: Progress | None = None,
        check: Callable[[Dataset], None] | None = None,
    ) -> Dataset:
        """Open a folder that `tensorkeep.train.data.prepare.prepare` made.

        Parameters
        ----------
        folder : path-like
        verify : bool
            Read all tokens: compare them with their checksums, and check that each is in the vocabulary.
        progress : callable, optional
            Called with (bytes done, bytes in total) while tokens are verified.
        check : callable, optional
            Called with the dataset before its tokens are verified; it raises an error to refuse the dataset.

        Returns
        -------
        Dataset

        Raises
        ------
        NotACheckpointError
            If the folder holds no prepared data.
        CorruptCheckpointError
            If the data is damaged.
        UnsupportedError
            If a later version wrote it.
        MissingExtraError
            If its tokenizer needs a package that is not installed.
        StoreError
            If the operating system refuses.

        Examples
        --------
        >>> import tempfile
        >>> from pathlib import Path
        >>> from tensorkeep.train.data.prepare import prepare
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text.txt").write_text("to be or not to be" * 9)
        ...     dataset = Dataset.open(prepare(f"{folder}/text.txt", f"{folder}/data").path)
        >>> dataset.tokenizer.decode(dataset.train[:8]), dataset.vocab_size
        ('to be or', 7)
        """
        path = Path(checked_path(folder))
        return read_directory(path, partial(_read, verify=verify, progress=progress, check=check))


def _read(
    directory: Directory,
    *,
    verify: bool,
    progress: Progress | None,
    check: Callable[[Dataset], None] | None,
) -> Dataset:
    layout, tokenizer = read_layout(directory)
    with ExitStack() as stack:
        files = {split: stack.enter_context(_open_tokens(directory, layout, split)) for split in SPLITS}
        tokens = {split: _map_tokens(file, layout, split) for split, file in files.items()}
        dataset = Dataset(
            path=directory.path,
            train=tokens[TRAIN],
            validation=tokens[VALIDATION],
            tokenizer=tokenizer,
            fingerprint=layout.fingerprint(tokenizer),
            about=layout.about(tokenizer),
        )
        if check is not None:
            check(dataset)
        if verify:
            meter = Meter(sum(file.size for file in files.values()), progress)
            for split, file in files.items():
                _verify(file, layout, split, meter)
    directory.close()
    return dataset


def _open_tokens(directory: Directory, layout: Layout, split: str) -> SourceFile:
    path = directory.path / file_name(split)
    try:
        file = directory.open(path.name, follow_links=False)
    except NotACheckpointError as error:
        raise CorruptCheckpointError("the file is missing", path=path, remedy="prepare the data again") from error
    expected = layout.splits[split].tokens * np.dtype(layout.dtype).itemsize
    if file.size != expected:
        file.close()
        raise CorruptCheckpointError(
            f"holds {file.size:,} bytes, not {expected:,}", path=path, remedy="prepare the data again"
        )
    return file


def _map_tokens(file: SourceFile, layout: Layout, split: str) -> Tokens:
    dtype = np.dtype(layout.dtype).newbyteorder("<")
    try:
        mapped = np.memmap(file.fd_path, dtype, mode="r", shape=(layout.splits[split].tokens,))
    except OSError as error:
        raise store_error(error, file.path, "map the file into memory") from error
    # Slicing a plain array is ten times as fast as slicing a numpy.memmap.
    return mapped.view(np.ndarray)


def _verify(file: SourceFile, layout: Layout, split: str, meter: Meter) -> None:
    hasher = new_hasher(wide=False)
    largest = 0
    buffer = np.empty(min(_VERIFIED_AT_ONCE, file.size), np.uint8)
    for begin in range(0, file.size, len(buffer)):
        piece = buffer[: file.size - begin]
        file.read_into(begin, piece)
        hasher.update(piece)
        largest = max(largest, int(piece.view(np.dtype(layout.dtype).newbyteorder("<")).max()))
        meter.add(piece.nbytes)
    if hasher.hexdigest() != layout.splits[split].xxh3_64:
        raise CorruptCheckpointError("its checksum is wrong", path=file.path, remedy="prepare the data again")
    if largest >= layout.vocab_size:
        raise CorruptCheckpointError(
            f"holds the token {largest:,}, and the vocabulary has {layout.vocab_size:,} tokens",
            path=file.path,
            remedy="prepare the data again",
        )
