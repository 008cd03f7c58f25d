"""Preparing data: a corpus is read twice, and a folder of tokens appears, whole or not at all."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.errors import PathLike, StoreError, UsageError
from tensorkeep.io.commit import Commit
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.train.data.documents import Reading
from tensorkeep.train.data.layout import FORMAT, VERSION, Layout, Origin, Split, file_name, is_replaceable, write_layout
from tensorkeep.train.data.sources import Source, open_source
from tensorkeep.train.data.splits import SPLITS, SplitRule
from tensorkeep.train.data.survey import Survey, survey
from tensorkeep.train.data.token_file import TokenFile
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.data.tokenizers.known import learner
from tensorkeep.version import __version__


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` has made.

    Attributes
    ----------
    path : Path
        The folder, for `Dataset.open`.
    about : dict
        What it holds, as `Dataset.about`.
    """

    path: Path
    about: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"path": str(self.path), **self.about}


def prepare(
    source: PathLike,
    out: PathLike,
    *,
    tokenizer: str = "char",
    vocab_size: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    encoding: str = "utf-8",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Turn a corpus into tokens that a training run maps into memory.

    The corpus is read twice and never held in memory: the first reading checks that all of it is text, and makes the
    tokenizer; the second one writes. Where there are documents, each goes whole to one split, by a hash of its name and
    the seed, and the token for the end of a document follows it. Otherwise the last characters are for validation.

    Parameters
    ----------
    source : path-like
        See `tensorkeep.train.data.sources.open_source`.
    out : path-like
        The folder to make.
    tokenizer : str
        ``"char"``, ``"byte"``, ``"bpe"`` or ``"tiktoken:NAME"``.
    vocab_size : int, optional
        For ``"bpe"``: the most tokens to have, by default 4096.
    validation : float
        The share of the text, or of the documents, that is kept for validation.
    seed : int
        By which documents are divided.
    encoding : str
        How the text is encoded; every byte must be.
    overwrite : bool
        Replace prepared data, and nothing else, that is there already.
    progress : callable, optional
        Called with (bytes done, bytes in all); both readings count.

    Returns
    -------
    Prepared

    Raises
    ------
    UsageError
        If an argument makes no sense, or the corpus is empty, not text, or too small to be divided.
    NotACheckpointError
        If there is no such source.
    DestinationExistsError
        If something is at ``out`` that may not be replaced.
    StoreError
        If the operating system refuses, or the corpus changes meanwhile; nothing is left behind.
    MissingExtraError, UnsupportedError
        If the tokenizer needs a package, or a vocabulary, that is not on this machine.
    """
    rule = SplitRule(validation, seed)
    learn = learner(tokenizer, vocab_size)
    destination = Path(checked_path(out))
    with (
        open_source(source, encoding=encoding) as corpus,
        Commit(destination, directory=True, overwrite=overwrite, replaceable=is_replaceable) as commit,
    ):
        meter = Meter(2 * corpus.nbytes, progress)
        found, made = survey(corpus, learn, rule, meter)
        splits = _write(corpus, commit.path, made, rule, found, meter)
        layout = _layout(corpus, found, made, rule, splits)
        write_layout(commit.path, layout)
        commit.publish()
        return Prepared(commit.destination, layout.about(made))


def _write(
    corpus: Source, folder: Path, tokenizer: Tokenizer, rule: SplitRule, found: Survey, meter: Meter
) -> dict[str, Split]:
    """Read the corpus for the second time and write its tokens."""
    reading = Reading(corpus, meter)
    with ExitStack() as stack:
        files = {split: stack.enter_context(TokenFile(folder / file_name(split), tokenizer.dtype)) for split in SPLITS}
        try:
            for split, texts in rule.parts(reading, found.characters):
                before = files[split].tokens
                for tokens in tokenizer.encode_stream(texts):
                    files[split].add(tokens)
                if corpus.has_documents and files[split].tokens > before:
                    files[split].add(np.array([tokenizer.end_of_document], tokenizer.dtype))
        except UsageError as error:
            # The first reading has met every character: what does not fit now was not there before.
            raise _changed(corpus) from error
        if reading.digest() != found.digest:
            raise _changed(corpus)
        documents = found.documents if corpus.has_documents else dict.fromkeys(SPLITS)
        return {
            split: Split(tokens=file.tokens, documents=documents[split], xxh3_64=file.finish())
            for split, file in files.items()
        }


def _changed(corpus: Source) -> StoreError:
    return StoreError("changed while it was read", path=corpus.spec, remedy="prepare it when nobody writes to it")


def _layout(corpus: Source, found: Survey, tokenizer: Tokenizer, rule: SplitRule, splits: dict[str, Split]) -> Layout:
    origin = Origin(
        # A path need not be text, which JSON is.
        spec=os.fsencode(corpus.spec).decode(errors="backslashreplace"),
        kind=corpus.kind,
        encoding=corpus.encoding,
        files=len(corpus.files),
        bytes=found.nbytes,
        characters=found.characters,
        documents=sum(found.documents.values()) if corpus.has_documents else None,
        xxh3_64=found.digest,
    )
    return Layout(
        format=FORMAT,
        version=VERSION,
        tensorkeep=__version__,
        source=origin,
        tokenizer=tokenizer.as_dict(),
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.name,
        validation=rule.validation,
        seed=rule.seed,
        splits=splits,
    )
