"""Prepared data: its files, and opening them checked, memory-mapped and read-only.

A folder of prepared data holds ``train.bin`` and ``validation.bin``, which are nothing but tokens (uint16 or uint32,
little-endian), and ``data.json``, which describes them and carries a checksum of itself (see
`tensorkeep.formats.checksummed_json`); its body is a `DataManifest`.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np

from chatgot.data.tokenizers.base import Tokenizer, Tokens, token_dtype
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.data.tokenizers.registry import tokenizer_from_dict
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike, UnsupportedError
from tensorkeep.ext import checked_path, prepared
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import Directory, Meter, Progress, SourceFile, read_directory, store_errors

FILE = "data.json"
FORMAT: Final = "tensorkeep-data"
VERSION: Final = 1
MIXTURE_VERSION: Final = 2  # earlier releases would read a mixture as one text
TRAIN = "train"
VALIDATION = "validation"
SPLITS = (TRAIN, VALIDATION)
# The kind of a source of conversations; see `chatgot.data.conversations`.
CONVERSATIONS = "conversations"
# Bytes.
_VERIFIED_AT_ONCE = 1 << 22
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One split of the data: its size and the checksum of its file. One stream of text has no number of documents."""

    tokens: _Positive
    documents: _Count | None
    xxh3_64: _Digest


class CorpusRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The corpus that the data was made from; the checksum covers the names and the bytes of its files."""

    spec: str
    kind: str
    encoding: str
    files: _Count
    bytes: _Count
    characters: _Count
    documents: _Count | None
    xxh3_64: _Digest


class MixturePart(msgspec.Struct, frozen=True, kw_only=True):
    """One source of a mixture: its weight (all weights add up to 1), its number of training tokens, and its data."""

    source: str
    weight: Annotated[float, msgspec.Meta(gt=0, le=1)]
    tokens: _Positive
    fingerprint: _Digest


class DataManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of ``data.json``."""

    format: Literal["tensorkeep-data"]
    version: Literal[1, 2]
    # The version that wrote it.
    tensorkeep: str
    source: CorpusRecord
    # The result of `Tokenizer.as_dict`.
    tokenizer: dict[str, Any]
    vocab_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    dtype: str
    # The fraction of the text that was meant for validation, and the seed that assigned documents to splits.
    validation: float
    seed: Annotated[int, msgspec.Meta(ge=0)]
    splits: dict[str, Split]
    mixture: list[MixturePart] | None = None  # in the order of the training split

    def description(self, tokenizer: Tokenizer) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "tokenizer": tokenizer.name, "fingerprint": self.fingerprint(tokenizer)}

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """Return 16 hexadecimal digits that depend on every token, the tokenizer and the weights, and nothing else."""
        parts = [tokenizer.digest, self.dtype, *(self.splits[split].xxh3_64 for split in SPLITS)]
        parts += [f"{part.tokens}:{part.weight!r}" for part in self.mixture or ()]
        return checksummed_json.digest(" ".join(parts).encode())


class FileStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the file system knows of a file; every write to the file changes it."""

    bytes: int
    inode: int
    modified_ns: int
    # The time of the last change (ctime) is set by the kernel, and cannot be set back.
    changed_ns: int


def file_name(split: str) -> str:
    return f"{split}.bin"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prepared data: tokens in memory-mapped files, and the tokenizer that made them."""

    path: Path
    # 1-D and read-only. They are mapped from the files: only what is used is read.
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    # 16 hexadecimal digits that depend on every token, the tokenizer and the weights of a mixture, and nothing else.
    fingerprint: str
    # The contents of ``data.json`` as plain values, with the name of the tokenizer and the fingerprint.
    description: dict[str, Any]
    # The numbers of training tokens and the weights of the sources of a mixture, in order; empty without a mixture.
    mixture: tuple[tuple[int, float], ...] = ()
    # The status of the files with verified tokens, by split.
    verified: dict[str, FileStatus] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def chat_tokenizer(self) -> ChatTokenizer | None:
        """The tokenizer of conversations, if the data is conversations: then only answers are trained."""
        is_chat = self.description["source"]["kind"] == CONVERSATIONS and isinstance(self.tokenizer, ChatTokenizer)
        return cast(ChatTokenizer, self.tokenizer) if is_chat else None

    @classmethod
    def open(
        cls,
        folder: PathLike,
        *,
        verify: bool = False,
        known: Mapping[str, FileStatus] | None = None,
        progress: Progress | None = None,
        check: "Callable[[Dataset], None] | None" = None,
    ) -> "Dataset":
        """Open a folder that `chatgot.data.prepare.prepare` made.

        Parameters
        ----------
        folder : path-like
        verify : bool
            Read all tokens: compare them with their checksums, and check that each is in the vocabulary.
        known : mapping of str to FileStatus, optional
            ``verified`` of an earlier dataset: files that have the same status are not read again.
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
        >>> from chatgot.data.prepare import prepare
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text.txt").write_text("to be or not to be" * 9)
        ...     dataset = Dataset.open(prepare(f"{folder}/text.txt", f"{folder}/data").path)
        >>> dataset.tokenizer.decode(dataset.train[:8]), dataset.vocab_size
        ('to be or', 7)
        """

        def read(directory: Directory) -> Dataset:
            layout, tokenizer = _read_layout(directory)
            with ExitStack() as stack:
                files = {split: stack.enter_context(_open_tokens(directory, layout, split)) for split in SPLITS}
                tokens = {split: _map_tokens(file, layout, split) for split, file in files.items()}
                dataset = cls(
                    path=directory.path,
                    train=tokens[TRAIN],
                    validation=tokens[VALIDATION],
                    tokenizer=tokenizer,
                    fingerprint=layout.fingerprint(tokenizer),
                    description=layout.description(tokenizer),
                    mixture=tuple((part.tokens, part.weight) for part in layout.mixture or ()),
                )
                if check is not None:
                    check(dataset)
                if verify:
                    # The status is from before the file was read: a change while it is read shows the next time.
                    dataset.verified.update({split: _status(file) for split, file in files.items()})
                    unknown = [split for split in SPLITS if (known or {}).get(split) != dataset.verified[split]]
                    meter = Meter(sum(files[split].size for split in unknown), progress)
                    for split in unknown:
                        _verify(files[split], layout, split, meter)
            # The mapped files stay mapped when their descriptors are closed.
            directory.close()
            return dataset

        return read_directory(Path(checked_path(folder)), read)


def _open_tokens(directory: Directory, layout: DataManifest, split: str) -> SourceFile:
    path = directory.path / file_name(split)
    try:
        file = directory.open(path.name, follow_links=False)
    except NotACheckpointError as error:
        raise _damaged(path, "the file is missing") from error
    # Reading a mapped file beyond its end kills the process with SIGBUS, so the size is checked before.
    expected = layout.splits[split].tokens * np.dtype(layout.dtype).itemsize
    if file.size != expected:
        file.close()
        raise _damaged(path, f"holds {file.size:,} bytes, not {expected:,}")
    return file


def _map_tokens(file: SourceFile, layout: DataManifest, split: str) -> Tokens:
    dtype = np.dtype(layout.dtype).newbyteorder("<")
    with store_errors(file.path, "map the file into memory"):
        # By the descriptor: the checked file, whatever is at its path by now.
        mapped = np.memmap(file.fd_path, dtype, mode="r", shape=(layout.splits[split].tokens,))
    # Slicing a plain array is ten times as fast as slicing a numpy.memmap.
    return mapped.view(np.ndarray)


def _status(file: SourceFile) -> FileStatus:
    of = file.status
    return FileStatus(bytes=of.st_size, inode=of.st_ino, modified_ns=of.st_mtime_ns, changed_ns=of.st_ctime_ns)


def _verify(file: SourceFile, layout: DataManifest, split: str, meter: Meter) -> None:
    hasher = checksummed_json.new_hasher(wide=False)
    largest = 0
    buffer = np.empty(min(_VERIFIED_AT_ONCE, file.size), np.uint8)
    for begin in range(0, file.size, len(buffer)):
        piece = buffer[: file.size - begin]
        file.read_into(begin, piece)
        hasher.update(piece)
        largest = max(largest, int(piece.view(np.dtype(layout.dtype).newbyteorder("<")).max()))
        meter.add(piece.nbytes)
    if hasher.hexdigest() != layout.splits[split].xxh3_64:
        raise _damaged(file.path, "its checksum is wrong")
    # A token beyond the vocabulary would index past the end of the embedding.
    if largest >= layout.vocab_size:
        raise _damaged(file.path, f"holds the token {largest:,}, and the vocabulary has {layout.vocab_size:,} tokens")


def _damaged(path: Path, message: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(message, path=path, remedy="prepare the data again")


def _read_layout(directory: Directory) -> tuple[DataManifest, Tokenizer]:
    path = directory.path / FILE
    try:
        body = checksummed_json.read(directory, FILE)
    except NotACheckpointError as error:
        raise NotACheckpointError(
            f"is not prepared data: it holds no {FILE}",
            path=directory.path,
            remedy="prepare data with `tensorkeep data prepare SOURCE --out DIR`",
        ) from error
    version = body.get("version")
    # Before the fields: a later version may have others.
    if body.get("format") == FORMAT and isinstance(version, int) and version > MIXTURE_VERSION:
        raise UnsupportedError(
            f"has version {version} of the layout, and this tensorkeep reads version {MIXTURE_VERSION}",
            path=path,
            remedy="update tensorkeep",
        )
    try:
        layout = msgspec.convert(body, prepared(DataManifest))
        tokenizer = tokenizer_from_dict(layout.tokenizer)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"is malformed ({error})", path=path) from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.message, path=path) from error
    if contradiction := _contradiction(layout, tokenizer):
        raise CorruptCheckpointError(f"contradicts itself: {contradiction}", path=path)
    return layout, tokenizer


def _contradiction(layout: DataManifest, tokenizer: Tokenizer) -> str | None:
    if set(layout.splits) != set(SPLITS):
        return f"its splits are {', '.join(sorted(layout.splits))}"
    if layout.mixture and sum(part.tokens for part in layout.mixture) != layout.splits[TRAIN].tokens:
        return "the sources of its mixture have other tokens than the training split"
    if tokenizer.vocab_size != layout.vocab_size:
        return f"a vocabulary of {layout.vocab_size:,}, and a tokenizer with {tokenizer.vocab_size:,}"
    if token_dtype(layout.vocab_size).name != layout.dtype:
        return f"a vocabulary of {layout.vocab_size:,} in {layout.dtype}"
    return None
