"""Preparation of data: a corpus becomes a folder of tokens for training and validation.

One pass checks that all of it is text, encodes it and writes the tokens. If the tokenizer learns from the text, or the
text is one stream, which is cut at a number of characters, a pass before that learns and counts.
"""

import codecs
import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorkeep.errors import DestinationExistsError, PathLike, StoreError, UsageError
from tensorkeep.formats import checksummed_json
from tensorkeep.paths import checked_path
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import write_small
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.train.data.conversations import first_fields, has_conversations, write_conversations
from tensorkeep.train.data.corpus import DEFAULT_FIELD, Source, open_source, pattern_of
from tensorkeep.train.data.dataset import CONVERSATIONS, FILE, SPLITS, VALIDATION, Dataset, Layout, Split, file_name
from tensorkeep.train.data.documents import MASKS, WEIGHTS, Reading, SplitRule
from tensorkeep.train.data.tables import Table
from tensorkeep.train.data.token_files import layout_of, origin_of, write_tokens
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.data.tokenizers.known import Learn, adopted, learner, tokenizer_at

logger = logging.getLogger(__name__)

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` made: the folder, for `Dataset.open`, and the description of its data, as in `Dataset`."""

    path: Path
    description: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
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
) -> Prepared:
    """Turn a corpus into token files that a training run maps into memory.

    The corpus is never held in memory. If it consists of documents, each goes to one split by a hash of its name and
    the seed, and is followed by an end-of-document token. Otherwise the last characters are for validation.

    Parameters
    ----------
    source : path-like
        See `tensorkeep.train.data.corpus.open_source`.
    out : path-like
        The folder to make; it appears when it is complete.
    tokenizer : str or Tokenizer
        ``"char"``, ``"byte"``, ``"bpe"``, ``"tiktoken:NAME"``, or ``"from:FOLDER"``: that of a run, of a Hugging
        Face model or of prepared data. With ``"+chat"`` after it, and always for conversations, it also has
        the tokens that begin and end messages.
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
        Whether each line of JSON is a conversation, of which answers are trained; see
        `tensorkeep.train.data.conversations`. By default the first line decides.
    processes : int, optional
        How many processes encode; the tokens do not depend on it. By default a large corpus is encoded by as many as
        there are processors, if the tokenizer merges characters, and any other by this one.
    overwrite : bool
        Replace prepared data at ``out``; nothing else is ever replaced.
    progress : callable, optional
        Called with (bytes done, bytes in total); all passes count.

    Returns
    -------
    Prepared

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
        return Prepared(commit.destination, layout.description(learned))


def _notes(corpus: Source, layout: Layout, seed: int) -> Iterator[str]:
    """Yield what was left out, and the arguments that had no effect."""
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
        yield f"the seed {seed} has no effect: the text is one stream, whose end is for validation"


def _other_fields(corpus: Source) -> Collection[str]:
    """Return the names of the fields, or columns, of the first document, of which the reading took no notice."""
    if corpus.files[0].records in ("parquet", "arrow"):
        with Table.open(corpus.files[0], corpus.field) as table:
            return table.columns
    return first_fields(corpus).keys() - {*WEIGHTS, *MASKS}


def _write_text(
    corpus: Source, folder: Path, learn: Learn, rule: SplitRule, processes: int | None, progress: Progress | None
) -> tuple[Layout, Tokenizer]:
    """Write the tokens of a text into a folder; return its layout and the tokenizer."""
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
            remedy="take the tokenizer of data that consists of documents as well; for that of a Hugging Face model, "
            "state eos_token in its tokenizer_config.json",
        )
    reading, splits = _encode(first, Reading(corpus, meter), folder, learned, rule, processes)
    return layout_of(origin_of(reading, splits), learned, splits, rule), learned


def is_prepared(source: PathLike) -> bool:
    """Return whether a source is a folder of prepared data."""
    return os.path.exists(os.path.join(source, FILE))


def learner_of(choice: str | Tokenizer, vocab_size: int | None) -> Learn:
    """Return what makes a tokenizer, which may be that of prepared data; see `learner`."""
    if isinstance(choice, str):
        return learner(choice, vocab_size, _tokenizer_of)
    if vocab_size is not None:
        raise UsageError(f"the tokenizer {choice.name!r} has a fixed vocabulary size", remedy="leave the size out")
    return adopted(choice)


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of prepared data, or of another folder; see `tokenizer_at`."""
    return Dataset.open(folder).tokenizer if is_prepared(folder) else tokenizer_at(folder)


def _survey(source: Source, learn: Learn, rule: SplitRule, meter: Meter) -> tuple[Reading, Tokenizer]:
    """Read the corpus to check it, count it, and learn a tokenizer."""
    reading = Reading(source, meter)
    counts = dict.fromkeys(SPLITS, 0)

    def documents() -> Iterator[Iterator[str]]:
        before = 0
        for document in reading.documents():
            yield document.texts
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
    first: Reading | None, reading: Reading, folder: Path, tokenizer: Tokenizer, rule: SplitRule, processes: int | None
) -> tuple[Reading, dict[str, Split]]:
    """Read the corpus, for the first time or again, and write its tokens."""
    corpus = reading.source
    changed = StoreError("changed while it was read", path=corpus.spec, remedy="prepare it when it is not written to")
    characters = 0 if first is None else first.characters
    try:
        splits = write_tokens(reading, folder, tokenizer, rule, characters=characters, processes=processes)
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


def _check_splits(source: Source, rule: SplitRule, counts: dict[str, int], characters: int) -> None:
    """Refuse a corpus that leaves a split empty."""
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
