"""Preparation of data: a corpus, or a mixture of several, becomes a folder of tokens for training and validation."""

import codecs
import logging
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chatgot.data.batches import check_weights
from chatgot.data.conversations import first_fields, has_conversations, write_conversations
from chatgot.data.corpus import (
    DEFAULT_FIELD,
    MASKS,
    STDIN,
    STDLIB,
    WEIGHTS,
    Corpus,
    CorpusReader,
    SplitRule,
    TextColumn,
    open_source,
    pattern_of,
)
from chatgot.data.dataset import (
    CONVERSATIONS,
    FILE,
    SPLITS,
    TRAIN,
    VALIDATION,
    CorpusRecord,
    DataManifest,
    Dataset,
    MixturePart,
    Split,
    file_name,
)
from chatgot.data.encoding import (
    layout_of,
    origin_of,
    pieces_of,
    recorded_path,
    splits_of,
    token_files,
    write_tokens,
)
from chatgot.data.tokenizers.base import Tokenizer, TokenizerFactory
from chatgot.data.tokenizers.registry import make_tokenizer, tokenizer_at
from tensorkeep.errors import DestinationExistsError, PathLike, StoreError, UsageError
from tensorkeep.ext import checked_path
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import Commit, Meter, Progress, write_small

logger = logging.getLogger(__name__)
_MOST_NAMED = 5


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
    """Turn a corpus into token files that a training run maps into memory.

    The corpus is never held in memory. If it consists of documents, each goes to one split by a hash of its name and
    the seed, and is followed by an end-of-document token. Otherwise the last characters are for validation.

    Parameters
    ----------
    source : path-like
        See `chatgot.data.corpus.open_source`.
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
        If an argument is invalid, or the corpus is empty, not text, or too small for two splits.
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
    rule = SplitRule(validation, seed)
    learn = learner_of(tokenizer, vocab_size)
    if processes is not None and processes < 1:
        raise UsageError(f"processes is {processes}", remedy="give 1 or more, or leave it out")
    destination = Path(checked_path(out))
    with (
        open_source(source, encoding=encoding, field=field) as corpus,
        Commit(destination, directory=True, overwrite=overwrite, replaceable=is_replaceable) as commit,
    ):
        learned: Tokenizer
        try:
            if has_conversations(corpus) if conversations is None else conversations:
                layout, learned = write_conversations(corpus, commit.path, learn, rule, processes, progress)
            else:
                layout, learned = _write_text(corpus, commit.path, learn, rule, processes, progress)
        except UsageError as error:  # of the tokenizer, which does not know the source
            error.path = error.path or corpus.spec
            raise
        write_small(commit.path / FILE, checksummed_json.seal(layout))
        for note in _notes(corpus, layout, seed):
            logger.warning("%s: %s", corpus.spec, note)
        commit.publish()
        return PreparedData(commit.destination, layout.description(learned))


def _notes(corpus: Corpus, layout: DataManifest, seed: int) -> Iterator[str]:
    if left_out := corpus.left_out():
        named = ", ".join(f"{suffix or 'none'} ({count:,})" for suffix, count in left_out.most_common(_MOST_NAMED))
        yield (
            f"{left_out.total():,} of {left_out.total() + len(corpus.files):,} files are left out, by the ends of "
            f"their names: {named}{', ...' if len(left_out) > _MOST_NAMED else ''}; a pattern such as "
            f"{pattern_of(Path(corpus.spec), '*')} reads files of any name"
        )
    unused = () if layout.source.kind == CONVERSATIONS else {*_other_fields(corpus)} - {corpus.field}
    if unused:
        named = ", ".join(map(repr, sorted(unused)[:_MOST_NAMED]))
        yield f"fields of the first document that are not used: {named}{', ...' if len(unused) > _MOST_NAMED else ''}"
    records = {file.records for file in corpus.files}
    if corpus.field != DEFAULT_FIELD and (records == {None} or layout.source.kind == CONVERSATIONS):
        yield f"the field {corpus.field!r} has no effect: lines and rows with fields are in .jsonl files and tables"
    if codecs.lookup(corpus.encoding).name != "utf-8" and records <= {"parquet", "arrow"}:
        yield f"the encoding {corpus.encoding!r} has no effect: tables are in UTF-8"
    if seed and not corpus.has_documents:
        yield f"the seed {seed} has no effect: the text is one stream, and its end is for validation"


def _other_fields(corpus: Corpus) -> Collection[str]:
    if corpus.files[0].records in ("parquet", "arrow"):
        with TextColumn.open(corpus.files[0], corpus.field) as table:
            return table.columns
    return first_fields(corpus).keys() - {*WEIGHTS, *MASKS}


def _write_text(
    corpus: Corpus,
    folder: Path,
    learn: TokenizerFactory,
    rule: SplitRule,
    processes: int | None,
    progress: Progress | None,
) -> tuple[DataManifest, Tokenizer]:
    # A tokenizer may learn from the text, and one stream is cut at a number of characters: a pass before the writing
    # learns and counts.
    surveyed = learn.reads or not corpus.has_documents
    meter = Meter((1 + surveyed) * corpus.nbytes, progress)
    if surveyed:
        first, learned = _survey(corpus, learn, rule, meter)
    else:
        first, learned = None, learn(iter(()), True)
    if corpus.has_documents and learned.end_of_document is None:
        raise UsageError(
            f"consists of documents, and the tokenizer ({learned.name}) has no token that ends one",
            path=corpus.spec,
            remedy="take the tokenizer of data that consists of documents as well; for the tokenizer of a Hugging Face "
            "model, state eos_token in its tokenizer_config.json",
        )
    reading, splits = _encode(first, CorpusReader(corpus, meter), folder, learned, rule, processes)
    return layout_of(origin_of(reading, splits), learned, splits, rule), learned


def is_prepared(source: PathLike) -> bool:
    return os.path.exists(os.path.join(source, FILE))


def learner_of(choice: str | Tokenizer, vocab_size: int | None) -> TokenizerFactory:
    """Return what makes a tokenizer; see `make_tokenizer`. A folder may be prepared data."""
    if isinstance(choice, str):
        return make_tokenizer(choice, vocab_size, _tokenizer_of)
    if vocab_size is not None:
        raise UsageError(f"the tokenizer {choice.name!r} has a fixed vocabulary size", remedy="leave the size out")
    return TokenizerFactory.of(choice)


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    return Dataset.open(folder).tokenizer if is_prepared(folder) else tokenizer_at(folder)


def _survey(source: Corpus, learn: TokenizerFactory, rule: SplitRule, meter: Meter) -> tuple[CorpusReader, Tokenizer]:
    reading = CorpusReader(source, meter)
    counts = dict.fromkeys(SPLITS, 0)

    def documents() -> Iterator[Iterator[str]]:
        before = 0
        for document in reading.documents():
            yield document.texts
            # An empty document is not written, so it does not count.
            if source.has_documents and reading.characters > before:
                counts[rule.of_document(document.name)] += 1
            before = reading.characters
        if not reading.characters:
            raise UsageError("holds no text", path=source.spec, remedy="check the source")

    corpus = documents()
    tokenizer = learn(corpus, source.has_documents)
    for texts in corpus:  # a tokenizer that learns nothing has not read them
        for _ in texts:
            pass
    _check_splits(source, rule, counts, reading.characters)
    return reading, tokenizer


def _encode(
    first: CorpusReader | None,
    reading: CorpusReader,
    folder: Path,
    tokenizer: Tokenizer,
    rule: SplitRule,
    processes: int | None,
) -> tuple[CorpusReader, dict[str, Split]]:
    corpus = reading.source
    changed = StoreError("changed while it was read", path=corpus.spec, remedy="prepare it when it is not written to")
    characters = 0 if first is None else first.characters
    try:
        pieces = pieces_of(reading, tokenizer, rule, characters)
        splits = write_tokens(reading, folder, tokenizer, pieces, processes)
    except UsageError as error:
        if first is None:
            raise
        # A character that cannot be encoded was added after the first pass.
        raise changed from error
    if first is None:
        if not reading.characters:
            raise UsageError("holds no text", path=corpus.spec, remedy="check the source")
        counts = {split: found.documents or 0 for split, found in splits.items()}
        _check_splits(corpus, rule, counts, reading.characters)
    elif reading.digest() != first.digest():
        raise changed
    return reading, splits


def _check_splits(source: Corpus, rule: SplitRule, counts: dict[str, int], characters: int) -> None:
    if source.has_documents:
        empty = next((split for split in SPLITS if not counts[split]), None)
        if empty is not None:
            raise UsageError(
                f"none of its {sum(counts.values()):,} documents is for {empty}: a hash of the name and the "
                "seed decides",
                path=source.spec,
                remedy="give another fraction or seed, more documents, or one file with all the text",
            )
        return
    train = rule.train_characters(characters)
    if not 0 < train < characters:
        split = VALIDATION if train else "training"
        raise UsageError(
            f"is so short ({characters:,} characters) that nothing is left for {split}",
            path=source.spec,
            remedy="give more text, or another fraction",
        )


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


logger = logging.getLogger(__name__)
# Tokens.
_COPIED_AT_ONCE = 1 << 22


def parse_mixture(source: PathLike) -> dict[str, float]:
    """Return the weights of a mixture such as ``"books:0.7,web.jsonl:0.3"``, by source; empty for a single source.

    A path that exists is a single source. Weights are relative: their sum need not be 1.

    Raises UsageError if a weight is missing, not above 0 or less than a billionth of all, or a source is named twice.

    Examples
    --------
    >>> parse_mixture("books:0.7,web.jsonl:0.3")
    {'books': 0.7, 'web.jsonl': 0.3}
    >>> parse_mixture("books")
    {}
    """
    text = os.fspath(source)
    if not isinstance(text, str) or ":" not in text or os.path.exists(text):
        return {}
    found: dict[str, float] = {}
    for each in text.split(","):
        name, _, weight = each.rpartition(":")
        try:
            value = float(weight)
        except ValueError:
            # The path of a single source may contain a colon.
            if "," not in text:
                return {}
            raise UsageError(
                f"{each!r} has no weight, in a mixture of several sources",
                remedy="write SOURCE:WEIGHT, such as books:0.7",
            ) from None
        if not 0 < value < float("inf") or not name or name in found:
            reason = "is named twice" if name in found else "needs a name and a weight above 0"
            raise UsageError(
                f"{each!r} {reason}", remedy="write SOURCE:WEIGHT, such as books:0.7, once for each source"
            )
        found[name] = value
    check_weights(found)
    return found


def absolute_source(source: str) -> str:
    """Return a source or a mixture with absolute paths where they exist: to be found from any folder."""
    if parts := parse_mixture(source):
        return ",".join(f"{absolute_source(name)}:{weight!r}" for name, weight in parts.items())
    source = os.fspath(checked_path(source))
    return os.path.abspath(source) if source not in (STDIN, STDLIB) and os.path.exists(source) else source


def prepare_mixture(
    source: str,
    out: PathLike,
    *,
    tokenizer: str = "char",
    vocab_size: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> PreparedData:
    """Prepare a single source as `prepare` does, or a mixture of prepared data and other sources.

    A weight is the fraction of the training windows that come from a source, in a run of any length: a small source is
    repeated, and a large one is used in part. All have one tokenizer: the tokenizer of the prepared data, else one that
    is made for all sources together. Prepared data is copied, so that the result needs nothing else.

    Parameters
    ----------
    source : str
        A source of `prepare`, or a mixture; see `parse_mixture`.
    out, tokenizer, vocab_size, overwrite, progress, **options
        As of `prepare`.

    Returns
    -------
    PreparedData

    Raises
    ------
    UsageError
        If the prepared data have different tokenizers, or are themselves a mixture; and the other errors of `prepare`
        and `Dataset.open`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a", "b"):
    ...         _ = Path(folder, f"{name}.txt").write_text(f"{name} text " * 99)
    ...     prepared = prepare_mixture(f"{folder}/a.txt:3,{folder}/b.txt:1", f"{folder}/data")
    >>> [part["weight"] for part in prepared.description["mixture"]]
    [0.75, 0.25]
    """
    weights = parse_mixture(source)
    if not weights:
        return prepare(
            source,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            overwrite=overwrite,
            progress=progress,
            **options,
        )
    _refuse_mixtures(weights)
    destination = Path(checked_path(out))
    with Commit(destination, directory=True, overwrite=overwrite, replaceable=is_replaceable) as commit:
        shared = _shared_tokenizer(list(weights), tokenizer, vocab_size, options)
        folders = []
        for number, name in enumerate(weights):
            if not is_prepared(name):
                part = commit.path / f"part-{number}"
                name = str(prepare(name, part, tokenizer=shared, progress=progress, **options).path)
            folders.append(name)
        parts = [Dataset.open(each, verify=True, progress=progress) for each in folders]
        for name, each in zip(weights, parts, strict=True):
            if each.chat_tokenizer is not None:
                raise UsageError(
                    "holds conversations, which cannot be mixed with other text", path=name, remedy="leave it out"
                )
        total = sum(weights.values())
        layout = _mix(parts, [weight / total for weight in weights.values()], list(weights), source, commit.path)
        # The tokens of the parts have been copied.
        for leftover in commit.path.glob("part-*"):
            shutil.rmtree(leftover)
        write_small(commit.path / FILE, checksummed_json.seal(layout))
        commit.publish()
        return PreparedData(commit.destination, layout.description(shared))


def _refuse_mixtures(weights: dict[str, float]) -> None:
    sources: Counter[str] = Counter()
    mixtures = []
    for name, weight in weights.items():
        parts = Dataset.open(name).description.get("mixture") if is_prepared(name) else None
        mixtures += [name] if parts else []
        for part in parts or [{"source": name, "weight": 1.0}]:
            sources[part["source"]] += weight * part["weight"]
    if mixtures:
        raise UsageError(
            "is a mixture itself, which cannot be a source of another",
            path=mixtures[0],
            remedy=f"mix its sources: {','.join(f'{name}:{weight:g}' for name, weight in sources.items())}",
        )


def _shared_tokenizer(names: list[str], choice: str, vocab_size: int | None, options: dict[str, Any]) -> Tokenizer:
    prepared = {name: Dataset.open(name).tokenizer for name in names if is_prepared(name)}
    for name, tokenizer in prepared.items():
        first = next(iter(prepared))
        if tokenizer.digest != prepared[first].digest:
            raise UsageError(
                f"was prepared with other tokens ({tokenizer.name}) than {first} ({prepared[first].name})",
                path=name,
                remedy="prepare both with one tokenizer: --tokenizer from:FOLDER takes the tokenizer of prepared data",
            )
    if prepared:
        return next(iter(prepared.values()))
    learn = learner_of(choice, vocab_size)
    if learn.reads and STDIN in names:
        raise UsageError(
            "standard input can be read once, and a tokenizer that learns from a mixture reads its sources twice",
            path=STDIN,
            remedy="write it to a file, or give a tokenizer that does not learn, such as --tokenizer byte",
        )
    source_options = {name: options[name] for name in ("encoding", "field") if name in options}

    def documents() -> Iterator[Iterator[str]]:
        for name in names:
            with open_source(name, **source_options) as corpus:
                yield from (each.texts for each in CorpusReader(corpus, Meter(1, None)).documents())

    return learn(documents() if learn.reads else iter(()), True)


def _mix(parts: list[Dataset], weights: list[float], names: list[str], source: str, folder: Path) -> DataManifest:
    tokenizer = parts[0].tokenizer
    # As many validation tokens as every source has for its weight.
    # The validation loss is the loss of the training mixture only if its split has the same proportions.
    most = min(len(part.validation) / weight for part, weight in zip(parts, weights, strict=True))
    # At least one token, because a source may be tiny.
    kept = [max(1, int(most * weight)) for weight in weights]
    left_out = [
        f"{len(part.validation) - count:,} of {len(part.validation):,} of {name}"
        for name, part, count in zip(names, parts, kept, strict=True)
        if count < len(part.validation)
    ]
    if left_out:
        logger.warning("validation tokens that are left out, to keep the weights: %s", ", ".join(left_out))
    with token_files(folder, tokenizer) as files:
        for part, validation in zip(parts, kept, strict=True):
            for split, tokens in ((TRAIN, part.train), (VALIDATION, part.validation[:validation])):
                # In pieces: the mapped tokens may be larger than memory.
                for begin in range(0, len(tokens), _COPIED_AT_ONCE):
                    files[split].add(np.array(tokens[begin : begin + _COPIED_AT_ONCE]))
        counts = [part.description["splits"][TRAIN]["documents"] for part in parts]
        documents = None if None in counts else sum(counts)
        splits = splits_of(files, {TRAIN: documents, VALIDATION: None})
    origins = [part.description["source"] for part in parts]
    origin = CorpusRecord(
        spec=recorded_path(source),
        kind="mixture",
        encoding=origins[0]["encoding"],
        **{name: sum(each[name] for each in origins) for name in ("files", "bytes", "characters")},
        documents=documents,
        xxh3_64=checksummed_json.digest(" ".join(each["xxh3_64"] for each in origins).encode()),
    )
    mixture = [
        MixturePart(source=name, weight=weight, tokens=len(part.train), fingerprint=part.fingerprint)
        for name, weight, part in zip(names, weights, parts, strict=True)
    ]
    first = parts[0].description
    return layout_of(origin, tokenizer, splits, SplitRule(first["validation"], first["seed"]), mixture)
