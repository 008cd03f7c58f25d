"""Preparation of data: a corpus, or a mixture of several, becomes a folder of tokens for training and validation."""

import codecs
import logging
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from chatgot.data.batches import check_weights
from chatgot.data.conversations import ConversationReader, first_fields, has_conversations
from chatgot.data.corpus import (
    DEFAULT_FIELD,
    MASKS,
    STDIN,
    STDLIB,
    WEIGHTS,
    Corpus,
    CorpusReader,
    Document,
    SplitRule,
    listed,
    open_source,
    open_table,
    pattern_of,
)
from chatgot.data.dataset import (
    CONVERSATIONS,
    FILE,
    FORMAT,
    MIXTURE_VERSION,
    SPLITS,
    TRAIN,
    VALIDATION,
    VERSION,
    CorpusRecord,
    DataManifest,
    Dataset,
    MixturePart,
    Split,
    file_name,
)
from chatgot.data.encoding import TextPiece, default_processes, encoded
from chatgot.data.tokenizers.base import Tokenizer, TokenizerFactory, Tokens
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.data.tokenizers.registry import make_tokenizer, tokenizer_at
from tensorkeep import __version__
from tensorkeep.errors import DestinationExistsError, PathLike, StoreError, UsageError
from tensorkeep.ext import Closing, checked_path
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import Commit, DirectFile, Meter, Progress, write_small

logger = logging.getLogger(__name__)
_WRITTEN_AT_ONCE = 1 << 20
# Tokens.
_COPIED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What `prepare` made: the folder, for `Dataset.open`, and the description of its data, as in `Dataset`."""

    path: Path
    description: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), **self.description}


def prepare(
    source: PathLike,
    out: PathLike,
    *,
    tokenizer: str | Tokenizer = "char",
    vocab_size: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    encoding: str = "utf-8",
    field: str = DEFAULT_FIELD,
    conversations: bool | None = None,
    processes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PreparedData:
    """Turn a corpus, or a mixture of several, into token files that a training run maps into memory.

    The corpus is never held in memory. If it consists of documents, each goes to one split by a hash of its name and
    the seed, and is followed by an end-of-document token. Otherwise the last characters are for validation.

    All sources of a mixture have one tokenizer: the tokenizer of those that are prepared data, else one that is made
    for all together. Prepared data is copied, so that the result needs nothing else.

    Parameters
    ----------
    source : path-like
        See `chatgot.data.corpus.open_source`; or a mixture of such sources and of folders of prepared data, such as
        ``"books:0.7,web.jsonl:0.3"``. A weight is the fraction of the training windows that come from a source, in a
        run of any length: a small source is repeated, and a large one is used in part. The sum need not be 1.
    out : path-like
        The folder to make; it appears when it is complete.
    tokenizer : str or Tokenizer
        ``"char"``, ``"byte"``, ``"bpe"``, ``"tiktoken:NAME"``, or ``"from:FOLDER"``: the tokenizer of a run, of a
        Hugging Face model or of prepared data. With ``"+chat"`` after it, and always for conversations, it also has the
        tokens that begin and end messages.
    vocab_size : int, optional
        For ``"bpe"``: the largest number of tokens, by default 4096.
    validation : float
        The fraction of the text, or of the documents, that is kept for validation.
    seed : int
        Decides which documents are for validation.
    encoding : str
        The encoding of the text.
    field : str
        The field of JSON objects, or the column of tables, that holds the text of a document.
    conversations : bool, optional
        Whether each line of JSON is a conversation; then only answers are trained. See
        `chatgot.data.conversations`. By default the first line decides.
    processes : int, optional
        How many processes encode; the tokens do not depend on it. By default a large corpus is encoded by as many as
        there are processors, if the tokenizer merges characters, and any other by this one.
    overwrite : bool
        Replace prepared data at ``out``; nothing else is ever replaced.
    progress : callable, optional
        Called with (bytes done, bytes in total); all passes count.

    Returns
    -------
    PreparedData

    Raises
    ------
    UsageError
        If an argument is invalid, or the corpus is empty, not text, or too small for two splits; or if the prepared
        data of a mixture have different tokenizers, or are themselves a mixture.
    NotACheckpointError
        If there is no such source.
    DestinationExistsError
        If something is at ``out`` that may not be replaced.
    OutOfMemoryError
        If a process that encodes runs out of memory.
    StoreError
        If the operating system refuses, or the corpus changes between two passes; nothing is left behind.
    MissingExtraError, UnsupportedError
        If the tokenizer or a table needs a package, or the tokenizer a vocabulary, that is not on this machine.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text.txt").write_text("to be or not to be" * 9)
    ...     prepared = prepare(f"{folder}/text.txt", f"{folder}/data", tokenizer="byte")
    >>> prepared.description["vocab_size"], prepared.description["splits"]["train"]["tokens"]
    (256, 145)
    """
    if processes is not None and processes < 1:
        raise UsageError(f"processes is {processes}", remedy="give 1 or more, or leave it out")
    work = _Preparation(SplitRule(validation, seed), encoding, field, conversations, processes, progress)
    weights = parse_mixture(source)
    # For a mixture, the choice of a tokenizer does not count if a source is prepared data.
    make = partial(tokenizer_factory, tokenizer, vocab_size)
    learn = None if weights else make()
    place = Path(checked_path(out))
    with ExitStack() as stack:
        # Before the folder of the data is made: nothing is written for a source that does not exist.
        corpus = None if weights else stack.enter_context(work.opened(source))
        new = Commit(place, directory=True, overwrite=overwrite, replaceable=is_replaceable)
        commit = stack.enter_context(new)
        if corpus is None or learn is None:
            manifest, learned = work.write_mixture(os.fspath(source), weights, commit.path, make)
        else:
            manifest, learned = work.write_corpus(corpus, commit.path, learn)
        commit.publish()
        return PreparedData(commit.destination, manifest.description(learned))


def is_prepared(source: PathLike) -> bool:
    return os.path.exists(os.path.join(source, FILE))


def is_replaceable(path: Path) -> bool:
    """Return True if a path is prepared data and nothing else; else raise DestinationExistsError with the reason."""
    ours = {FILE, *map(file_name, SPLITS)}
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if FILE in names and names <= ours:
        return True
    raise DestinationExistsError(
        f"also holds {sorted(names - ours)[0]!r}" if FILE in names else "is not prepared data, so it is not replaced",
        path=path,
        remedy="choose another path, or remove it yourself",
    )


def tokenizer_factory(choice: str | Tokenizer, vocab_size: int | None) -> TokenizerFactory:
    """Return what makes a tokenizer; see `make_tokenizer`. A folder may be prepared data."""
    if isinstance(choice, str):
        return make_tokenizer(choice, vocab_size, _tokenizer_of)
    if vocab_size is not None:
        raise UsageError(f"the tokenizer {choice.name!r} has a fixed vocabulary size", remedy="leave the size out")
    return TokenizerFactory.of(choice)


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    return Dataset.open(folder).tokenizer if is_prepared(folder) else tokenizer_at(folder)


@dataclass(frozen=True, slots=True)
class _Preparation:
    """The settings of `prepare`, for a single source or for each source of a mixture."""

    rule: SplitRule
    encoding: str
    field: str
    conversations: bool | None
    processes: int | None
    progress: Progress | None

    def opened(self, source: PathLike) -> AbstractContextManager[Corpus]:
        return open_source(source, encoding=self.encoding, field=self.field)

    def write_corpus(self, corpus: Corpus, folder: Path, learn: TokenizerFactory) -> tuple[DataManifest, Tokenizer]:
        talks = has_conversations(corpus) if self.conversations is None else self.conversations
        try:
            reader, tokenizer, splits = self._encode(corpus, talks, folder, learn)
        except UsageError as error:  # of the tokenizer, which does not know the source
            error.path = error.path or corpus.spec
            raise
        for note in _notes(corpus, reader, self.rule.seed):
            logger.warning("%s: %s", corpus.spec, note)
        origin = CorpusRecord(
            spec=_recorded_path(corpus.spec),
            kind=CONVERSATIONS if talks else corpus.kind,
            encoding=corpus.encoding,
            files=len(corpus.files),
            bytes=reader.nbytes,
            characters=reader.characters,
            documents=sum(each.documents or 0 for each in splits.values()) if corpus.has_documents else None,
            xxh3_64=reader.digest(),
        )
        return _write_manifest(folder, origin, tokenizer, splits, self.rule), tokenizer

    def _encode(
        self, corpus: Corpus, talks: bool, folder: Path, learn: TokenizerFactory
    ) -> tuple[CorpusReader, Tokenizer, dict[str, Split]]:
        # A tokenizer may learn from the text, and one stream is cut at a number of characters: a pass before the
        # writing learns and counts.
        surveyed = learn.reads or not corpus.has_documents
        meter = Meter((1 + surveyed) * corpus.nbytes, self.progress)
        first, second = ((ConversationReader if talks else CorpusReader)(corpus, meter) for _ in range(2))
        texts = (document.texts for document in _documents(first)) if surveyed else iter(())
        tokenizer = learn(texts, corpus.has_documents and not talks)
        for each in texts:  # a tokenizer that learns nothing has not read them
            deque(each, maxlen=0)
        if talks:
            tokenizer = ChatTokenizer.of(tokenizer)
        elif corpus.has_documents and tokenizer.end_of_document is None:
            raise UsageError(
                f"consists of documents, and the tokenizer ({tokenizer.name}) has no token that ends one",
                path=corpus.spec,
                remedy="take the tokenizer of data that consists of documents as well; for the tokenizer of a Hugging "
                "Face model, state eos_token in its tokenizer_config.json",
            )
        remedy = "prepare it when it is not written to"
        changed = StoreError("changed while it was read", path=corpus.spec, remedy=remedy)
        try:
            splits = self._write_tokens(second, folder, tokenizer, first.characters)
        except UsageError as error:
            if surveyed:  # the first pass would have met the error
                raise changed from error
            raise
        if surveyed and second.digest() != first.digest():
            raise changed
        _check_splits(second, self.rule, splits, "conversations" if talks else "documents")
        return second, tokenizer, splits

    def _write_tokens(
        self, reader: CorpusReader, folder: Path, tokenizer: Tokenizer, characters: int
    ) -> dict[str, Split]:
        ending = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
        documents, begins = dict.fromkeys(SPLITS, 0), True
        processes = self.processes or default_processes(tokenizer, reader.source.nbytes)
        found = encoded(tokenizer, _pieces(reader, tokenizer, self.rule, characters), processes)
        with _token_files(folder, tokenizer) as files, closing(found):
            for piece, tokens in found:
                before = [*(tokenizer.opening if begins else []), *piece.before]
                after = [*piece.after, *(ending if piece.ends_document else [])]
                for each in (before, tokens, after):
                    if len(each):
                        files[piece.split].add(np.asarray(each, tokenizer.dtype))
                begins = piece.ends_document
                documents[piece.split] += piece.ends_document
            return _splits_of(files, documents if reader.source.has_documents else dict.fromkeys(SPLITS))

    def write_mixture(
        self, source: str, weights: Mapping[str, float], folder: Path, learn: Callable[[], TokenizerFactory]
    ) -> tuple[DataManifest, Tokenizer]:
        prepared = {name: Dataset.open(name) for name in weights if is_prepared(name)}
        _refuse_mixtures(weights, prepared)
        tokenizer = _shared_tokenizer(prepared) or self._learn_together(list(weights), learn())
        parts: dict[str, Dataset] = {}
        for number, name in enumerate(weights):
            place = Path(name)
            if name not in prepared:
                place = folder / f"part-{number}"
                place.mkdir()
                with self.opened(name) as corpus:
                    self.write_corpus(corpus, place, TokenizerFactory.of(tokenizer))
            parts[name] = Dataset.open(place, verify=True, progress=self.progress)
            if parts[name].chat_tokenizer is not None:
                raise UsageError(
                    "holds conversations, which cannot be mixed with other text", path=name, remedy="leave it out"
                )
        total = sum(weights.values())
        manifest = _mix(parts, [weight / total for weight in weights.values()], source, folder)
        # The tokens of the parts have been copied.
        for leftover in folder.glob("part-*"):
            shutil.rmtree(leftover)
        return manifest, tokenizer

    def _learn_together(self, names: list[str], learn: TokenizerFactory) -> Tokenizer:
        if learn.reads and STDIN in names:
            raise UsageError(
                "standard input can be read once, and a tokenizer that learns from a mixture reads its sources twice",
                path=STDIN,
                remedy="write it to a file, or give a tokenizer that does not learn, such as --tokenizer byte",
            )

        def texts() -> Iterator[Iterator[str]]:
            for name in names:
                with self.opened(name) as corpus:
                    yield from (each.texts for each in CorpusReader(corpus, Meter(1, None)).documents())

        return learn(texts() if learn.reads else iter(()), True)


def _notes(corpus: Corpus, reader: CorpusReader, seed: int) -> Iterator[str]:
    """Yield what of the corpus, or of the arguments, is not used."""
    if left_out := corpus.left_out():
        named = listed([f"{suffix or 'none'} ({count:,})" for suffix, count in left_out.most_common()])
        yield (
            f"{left_out.total():,} of {left_out.total() + len(corpus.files):,} files are left out, by the ends of "
            f"their names: {named}; a pattern such as {pattern_of(Path(corpus.spec), '*')} reads files of any name"
        )
    records, talks = {file.records for file in corpus.files}, isinstance(reader, ConversationReader)
    if isinstance(reader, ConversationReader):
        if reader.unused:
            named = listed([f"{name!r} ({count:,})" for name, count in reader.unused.most_common()])
            yield f"fields of conversations that are not used: {named}"
    elif unused := _other_fields(corpus) - {corpus.field}:
        yield f"fields of the first document that are not used: {listed(sorted(map(repr, unused)))}"
    if corpus.field != DEFAULT_FIELD and (records == {None} or talks):
        yield f"the field {corpus.field!r} has no effect: lines and rows with fields are in .jsonl files and tables"
    if codecs.lookup(corpus.encoding).name != "utf-8" and records <= {"parquet", "arrow"}:
        yield f"the encoding {corpus.encoding!r} has no effect: tables are in UTF-8"
    if seed and not corpus.has_documents:
        yield f"the seed {seed} has no effect: the text is one stream, and its end is for validation"


def _other_fields(corpus: Corpus) -> set[str]:
    if corpus.files[0].records in ("parquet", "arrow"):
        with open_table(corpus.files[0], corpus.field) as (columns, _):
            return {*columns}
    return first_fields(corpus).keys() - {*WEIGHTS, *MASKS}


def _documents(reader: CorpusReader) -> Iterator[Document]:
    yield from reader.documents()
    if not reader.characters:
        raise UsageError("holds no text", path=reader.source.spec, remedy="check the source")


def _pieces(reader: CorpusReader, tokenizer: Tokenizer, rule: SplitRule, characters: int) -> Iterator[TextPiece]:
    """Yield all text of a corpus but empty documents, in pieces that the tokenizer may encode by themselves."""
    for document in _documents(reader):
        if isinstance(tokenizer, ChatTokenizer) and document.roles:
            split, last = rule.of_document(document.name), len(document.roles) - 1
            for number, (role, text) in enumerate(zip(document.roles, document.texts, strict=True)):
                yield TextPiece(split, text, number == last, (tokenizer.begin[role],), (tokenizer.end,))
            continue
        if reader.source.has_documents:
            parts = iter([(rule.of_document(document.name), document.texts)])
        else:
            parts = _cut(document.texts, rule.train_characters(characters))
        for split, texts in parts:
            # One text behind: only the last one ends the document.
            before = None
            for text in filter(None, tokenizer.pieces(texts)):
                if before is not None:
                    yield TextPiece(split, before, False)
                before = text
            if before is not None:
                yield TextPiece(split, before, reader.source.has_documents)


def _cut(texts: Iterator[str], characters: int) -> Iterator[tuple[str, Iterator[str]]]:
    rest: list[str] = []

    def first() -> Iterator[str]:
        left = characters
        for text in texts:
            if len(text) >= left:
                rest.append(text[left:])
                yield text[:left]
                return
            left -= len(text)
            yield text

    yield TRAIN, first()
    # The first text has filled `rest` by now, because it is consumed before.
    yield VALIDATION, chain(rest, texts)


def _check_splits(reader: CorpusReader, rule: SplitRule, splits: dict[str, Split], kind: str) -> None:
    source = reader.source
    counts = {split: each.documents or 0 for split, each in splits.items()}
    empty = next((split for split, count in counts.items() if not count), None)
    if source.has_documents and empty is not None:
        what, more = ("line's number", f"or more {kind}")
        if kind == "documents":
            what, more = "name", "more documents, or one file with all the text"
        raise UsageError(
            f"none of its {sum(counts.values()):,} {kind} is for {empty}: a hash of the {what} and the seed decides",
            path=source.spec,
            remedy=f"give another fraction or seed, {more}",
        )
    train = rule.train_characters(reader.characters)
    if not source.has_documents and not 0 < train < reader.characters:
        raise UsageError(
            f"is so short ({reader.characters:,} characters) that nothing is left for "
            f"{VALIDATION if train else 'training'}",
            path=source.spec,
            remedy="give more text, or another fraction",
        )


class _TokenFile(Closing):
    """Appends tokens to a new file and computes their checksum; a context manager that closes the file."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.tokens = 0
        self._dtype = dtype
        self._file = DirectFile(path, direct=False)
        self._hasher = checksummed_json.new_hasher(wide=False)
        self._waiting: list[Tokens] = []
        self._waiting_bytes = 0
        self._written = 0

    def add(self, tokens: Tokens) -> None:
        self._waiting.append(tokens)
        self._waiting_bytes += tokens.nbytes
        self.tokens += len(tokens)
        # Many documents are short: one write for several.
        if self._waiting_bytes >= _WRITTEN_AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            content = np.concatenate(self._waiting, dtype=self._dtype).view(np.uint8)
            self._hasher.update(content)
            self._file.write(self._written, content)
            self._written += content.nbytes
            self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> str:
        """Make the file durable, close it, and return the xxh3-64 of its bytes as 16 hexadecimal digits."""
        self._write()
        self._file.finish(self._written)
        return str(self._hasher.hexdigest())

    def close(self) -> None:
        self._file.close()


@contextmanager
def _token_files(folder: Path, tokenizer: Tokenizer) -> Iterator[dict[str, _TokenFile]]:
    with ExitStack() as stack:
        yield {split: stack.enter_context(_TokenFile(folder / file_name(split), tokenizer.dtype)) for split in SPLITS}


def _splits_of(files: dict[str, _TokenFile], documents: Mapping[str, int | None]) -> dict[str, Split]:
    """Make the token files of the splits durable, and return their records."""
    return {
        split: Split(tokens=file.tokens, documents=documents[split], xxh3_64=file.finish())
        for split, file in files.items()
    }


def _recorded_path(path: str) -> str:
    # JSON must be valid text, and the name of a file need not be.
    return os.fsencode(path).decode(errors="backslashreplace")


def _write_manifest(
    folder: Path,
    origin: CorpusRecord,
    tokenizer: Tokenizer,
    splits: dict[str, Split],
    rule: SplitRule,
    mixture: list[MixturePart] | None = None,
) -> DataManifest:
    manifest = DataManifest(
        format=FORMAT,
        version=VERSION if mixture is None else MIXTURE_VERSION,
        tensorkeep=__version__,
        source=origin,
        tokenizer=tokenizer.as_dict(),
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.name,
        validation=rule.validation,
        seed=rule.seed,
        splits=splits,
        mixture=mixture,
    )
    write_small(folder / FILE, checksummed_json.seal(manifest))
    return manifest


def parse_mixture(source: PathLike) -> dict[str, float]:
    """Return the weights of a mixture such as ``"books:0.7,web.jsonl:0.3"``, by source; empty for a single source.

    A path that exists is a single source. Raises UsageError if a weight is missing, not above 0 or less than a
    billionth of all, or a source is named twice.
    """
    text = os.fspath(source)
    if not isinstance(text, str) or ":" not in text or os.path.exists(text):
        return {}
    found: dict[str, float] = {}
    remedy = "write SOURCE:WEIGHT, such as books:0.7, once for each source"
    for each in text.split(","):
        name, _, weight = each.rpartition(":")
        try:
            value = float(weight)
        except ValueError:
            # The path of a single source may contain a colon.
            if "," not in text:
                return {}
            raise UsageError(f"{each!r} has no weight, in a mixture of several sources", remedy=remedy) from None
        if not 0 < value < float("inf") or not name or name in found:
            reason = "is named twice" if name in found else "needs a name and a weight above 0"
            raise UsageError(f"{each!r} {reason}", remedy=remedy)
        found[name] = value
    check_weights(found)
    return found


def absolute_source(source: str) -> str:
    """Return a source or a mixture with absolute paths where they exist: to be found from any folder."""
    if parts := parse_mixture(source):
        return ",".join(f"{absolute_source(name)}:{weight!r}" for name, weight in parts.items())
    source = os.fspath(checked_path(source))
    return os.path.abspath(source) if source not in (STDIN, STDLIB) and os.path.exists(source) else source


def _refuse_mixtures(weights: Mapping[str, float], prepared: Mapping[str, Dataset]) -> None:
    sources: Counter[str] = Counter()
    mixed = {name: each.description["mixture"] for name, each in prepared.items() if each.mixture}
    for name, weight in weights.items():
        for part in mixed.get(name, [{"source": name, "weight": 1.0}]):
            sources[part["source"]] += weight * part["weight"]
    if mixed:
        raise UsageError(
            "is a mixture itself, which cannot be a source of another",
            path=next(iter(mixed)),
            remedy=f"mix its sources: {','.join(f'{name}:{weight:g}' for name, weight in sources.items())}",
        )


def _shared_tokenizer(prepared: Mapping[str, Dataset]) -> Tokenizer | None:
    """Return the tokenizer of the prepared data of a mixture; None if no source is prepared."""
    found = {name: each.tokenizer for name, each in prepared.items()}
    first = next(iter(found), None)
    if first is None:
        return None
    for name, tokenizer in found.items():
        if tokenizer.digest != found[first].digest:
            raise UsageError(
                f"was prepared with other tokens ({tokenizer.name}) than {first} ({found[first].name})",
                path=name,
                remedy="prepare both with one tokenizer: --tokenizer from:FOLDER takes the tokenizer of prepared data",
            )
    return found[first]


def _mix(parts: Mapping[str, Dataset], weights: list[float], source: str, folder: Path) -> DataManifest:
    first = next(iter(parts.values()))
    # As many validation tokens as every source has for its weight.
    # The validation loss is the loss of the training mixture only if its split has the same proportions.
    most = min(len(part.validation) / weight for part, weight in zip(parts.values(), weights, strict=True))
    # At least one token, because a source may be tiny.
    kept = {name: max(1, int(most * weight)) for name, weight in zip(parts, weights, strict=True)}
    left_out = [
        f"{len(part.validation) - kept[name]:,} of {len(part.validation):,} of {name}"
        for name, part in parts.items()
        if kept[name] < len(part.validation)
    ]
    if left_out:
        logger.warning("validation tokens that are left out, to keep the weights: %s", ", ".join(left_out))
    counts = [part.description["splits"][TRAIN]["documents"] for part in parts.values()]
    documents = None if None in counts else sum(counts)
    with _token_files(folder, first.tokenizer) as files:
        for name, part in parts.items():
            for split, tokens in ((TRAIN, part.train), (VALIDATION, part.validation[: kept[name]])):
                # In pieces: the mapped tokens may be larger than memory.
                for begin in range(0, len(tokens), _COPIED_AT_ONCE):
                    files[split].add(np.array(tokens[begin : begin + _COPIED_AT_ONCE]))
        splits = _splits_of(files, {TRAIN: documents, VALIDATION: None})
    origins = [part.description["source"] for part in parts.values()]
    origin = CorpusRecord(
        spec=_recorded_path(source),
        kind="mixture",
        encoding=origins[0]["encoding"],
        **{name: sum(each[name] for each in origins) for name in ("files", "bytes", "characters")},
        documents=documents,
        xxh3_64=checksummed_json.digest(" ".join(each["xxh3_64"] for each in origins).encode()),
    )
    mixture = [
        MixturePart(source=name, weight=weight, tokens=len(part.train), fingerprint=part.fingerprint)
        for (name, part), weight in zip(parts.items(), weights, strict=True)
    ]
    rule = SplitRule(first.description["validation"], first.description["seed"])
    return _write_manifest(folder, origin, first.tokenizer, splits, rule, mixture)
