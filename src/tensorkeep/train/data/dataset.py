"""Opening prepared data: checked, mapped into memory, and read-only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike
from tensorkeep.formats.sealed import new_hasher
from tensorkeep.io.directory import Directory, hold
from tensorkeep.io.files import store_error
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.io.source_file import SourceFile
from tensorkeep.train.data.layout import Layout, file_name, read_layout
from tensorkeep.train.data.splits import SPLITS, TRAIN, VALIDATION
from tensorkeep.train.data.tokenizers.base import Tokenizer, Tokens

_VERIFIED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prepared data.

    Attributes
    ----------
    path : Path
        Its folder.
    train, validation : array of uint16 or uint32
        1-D, read-only, mapped from the files: only what is used is read.
    tokenizer : Tokenizer
    fingerprint : str
        Changes with any token and with what the tokens mean, and with nothing else.
    about : dict
        What ``data.json`` says, as plain values.
    """

    path: Path
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    about: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; ids are below it."""
        return self.tokenizer.vocab_size

    @classmethod
    def open(cls, folder: PathLike, *, verify: bool = False, progress: Progress | None = None) -> Self:
        """Open what `prepare` has made.

        Parameters
        ----------
        folder : path-like
        verify : bool
            Read all tokens: compare them with their checksums, and check that each is in the vocabulary.
        progress : callable, optional
            Called with (bytes done, bytes in all) while that goes on.

        Raises
        ------
        NotACheckpointError
            If there is no prepared data.
        CorruptCheckpointError
            If it is damaged.
        UnsupportedError
            If a later version wrote it.
        MissingExtraError
            If its tokenizer needs a package that is not installed.
        StoreError
            If the operating system refuses.
        """
        path = Path(checked_path(folder))
        layout, tokenizer, tokens = hold(path, partial(_read, verify=verify, progress=progress))
        return cls(
            path=path,
            train=tokens[TRAIN],
            validation=tokens[VALIDATION],
            tokenizer=tokenizer,
            fingerprint=layout.fingerprint(tokenizer),
            about=layout.about(tokenizer),
        )


def _read(
    directory: Directory, *, verify: bool, progress: Progress | None
) -> tuple[Layout, Tokenizer, dict[str, Tokens]]:
    layout, tokenizer = read_layout(directory)
    meter = Meter(sum(_nbytes(layout, split) for split in SPLITS), progress)
    tokens = {split: _tokens(directory, layout, split, meter if verify else None) for split in SPLITS}
    directory.close()
    return layout, tokenizer, tokens


def _nbytes(layout: Layout, split: str) -> int:
    return layout.splits[split].tokens * np.dtype(layout.dtype).itemsize


def _tokens(directory: Directory, layout: Layout, split: str, meter: Meter | None) -> Tokens:
    path = directory.path / file_name(split)
    try:
        file = directory.open(path.name, follow_links=False)
    except NotACheckpointError as error:
        raise CorruptCheckpointError("the file is missing", path=path, remedy="prepare the data again") from error
    with file:
        expected = _nbytes(layout, split)
        if file.size != expected:
            raise CorruptCheckpointError(
                f"holds {file.size:,} bytes, not {expected:,}", path=path, remedy="prepare the data again"
            )
        if meter is not None:
            _verify(file, layout, split, meter)
        dtype = np.dtype(layout.dtype).newbyteorder("<")
        try:
            mapped = np.memmap(file.held_path, dtype, mode="r", shape=(layout.splits[split].tokens,))
        except OSError as error:
            raise store_error(error, path, "map the file into memory") from error
        # A plain array is sliced ten times as fast as numpy's class for maps.
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
            f"holds the token {largest:,}, and the vocabulary has {layout.vocab_size:,}",
            path=file.path,
            remedy="prepare the data again",
        )
