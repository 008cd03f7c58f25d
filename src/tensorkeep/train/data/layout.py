"""How prepared data lies on disk: ``train.bin``, ``validation.bin``, and a ``data.json`` that says what they are.

A ``.bin`` file is nothing but tokens, uint16 or uint32, little-endian. ``data.json`` carries a checksum of itself, see
`tensorkeep.formats.sealed`; its body is a `Layout`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import write_small
from tensorkeep.train.data.splits import SPLITS
from tensorkeep.train.data.tokenizers.base import Tokenizer, token_dtype
from tensorkeep.train.data.tokenizers.known import tokenizer_from_dict

FILE = "data.json"
FORMAT: Final = "tensorkeep-data"
VERSION: Final = 1

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the data.

    Attributes
    ----------
    tokens : int
    documents : int or None
        None where the corpus has no documents.
    xxh3_64 : str
        Of the file's bytes.
    """

    tokens: _Positive
    documents: _Count | None
    xxh3_64: _Digest


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What the data was made from.

    Attributes
    ----------
    spec, kind, encoding : str
        As in `tensorkeep.train.data.sources.Source`.
    files, bytes, characters : int
    documents : int or None
    xxh3_64 : str
        Of the names of the files and their bytes.
    """

    spec: str
    kind: str
    encoding: str
    files: _Count
    bytes: _Count
    characters: _Count
    documents: _Count | None
    xxh3_64: _Digest


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``data.json``.

    Attributes
    ----------
    format, version : str, int
        Of this layout.
    tensorkeep : str
        The version that wrote it.
    source : Origin
    tokenizer : dict
        As `Tokenizer.as_dict` gives it.
    vocab_size : int
    dtype : str
    validation : float
        The share of the text that was to be kept for validation.
    seed : int
        By which documents were divided.
    splits : dict of str to Split
    """

    format: Literal["tensorkeep-data"]
    version: Literal[1]
    tensorkeep: str
    source: Origin
    tokenizer: dict[str, Any]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    dtype: str
    validation: float
    seed: Annotated[int, msgspec.Meta(ge=0)]
    splits: dict[str, Split]

    def about(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return all of it as plain values, but for the tokenizer only its name."""
        return {**msgspec.to_builtins(self), "tokenizer": tokenizer.name, "fingerprint": self.fingerprint(tokenizer)}

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """Return 16 hexadecimal digits that change with any token and with what the tokens mean."""
        parts = [tokenizer.digest, self.dtype, *(self.splits[split].xxh3_64 for split in SPLITS)]
        return sealed.digest(" ".join(parts).encode())


def file_name(split: str) -> str:
    """Return the name of a split's file."""
    return f"{split}.bin"


def write_layout(folder: Path, layout: Layout) -> None:
    """Write ``data.json`` into a folder and make it durable; StoreError if the operating system refuses."""
    write_small(folder / FILE, sealed.seal(layout))


def read_layout(directory: Directory) -> tuple[Layout, Tokenizer]:
    """Return what a folder says that it holds, checked for itself but not against the other files.

    Raises
    ------
    NotACheckpointError
        If it is no folder of prepared data.
    CorruptCheckpointError
        If ``data.json`` is damaged or contradicts itself.
    UnsupportedError
        If a later version wrote it.
    MissingExtraError
        If its tokenizer needs a package that is not installed.
    """
    path = directory.path / FILE
    try:
        body = sealed.read(directory, FILE)
    except NotACheckpointError as error:
        raise NotACheckpointError(
            f"is no prepared data: it holds no {FILE}",
            path=directory.path,
            remedy="make some with `tensorkeep data prepare SOURCE --out DIR`",
        ) from error
    version = body.get("version")
    if body.get("format") == FORMAT and isinstance(version, int) and version > VERSION:
        raise UnsupportedError(
            f"is of version {version} of the layout, and this tensorkeep knows {VERSION}",
            path=path,
            remedy="update tensorkeep",
        )
    try:
        layout = msgspec.convert(body, Layout)
        tokenizer = tokenizer_from_dict(layout.tokenizer)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"is malformed ({error})", path=path) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.message, path=path) from error
    contradiction = _contradiction(layout, tokenizer)
    if contradiction:
        raise CorruptCheckpointError(f"contradicts itself: {contradiction}", path=path)
    return layout, tokenizer


def _contradiction(layout: Layout, tokenizer: Tokenizer) -> str | None:
    if set(layout.splits) != set(SPLITS):
        return f"its splits are {', '.join(sorted(layout.splits))}"
    if tokenizer.vocab_size != layout.vocab_size:
        return f"a vocabulary of {layout.vocab_size:,}, and a tokenizer with {tokenizer.vocab_size:,}"
    if token_dtype(layout.vocab_size).name != layout.dtype:
        return f"a vocabulary of {layout.vocab_size:,} in {layout.dtype}"
    return None


def is_replaceable(path: Path) -> bool:
    """Say whether a path is prepared data and nothing else, so that new data may take its place.

    Raises
    ------
    DestinationExistsError
        If it is not, with the reason.
    """
    ours = {FILE, *map(file_name, SPLITS)}
    held = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if FILE in held and held <= ours:
        return True
    raise DestinationExistsError(
        f"holds {sorted(held - ours)[0]!r}, too" if FILE in held else "is no prepared data, so it is not replaced",
        path=path,
        remedy="choose another path, or remove it yourself",
    )
