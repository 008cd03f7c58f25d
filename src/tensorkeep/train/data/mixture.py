"""Mixtures: several sources become one folder of prepared data, of which each has a weight.

A weight is the fraction of the training windows, and so of the tokens, that come from a source, in every run of any
length: a source that is small for its weight is repeated, and one that is large is used in part. The validation split
holds the sources in the same proportions, as much as there is, so that its loss is that of the training text.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats import checksummed_json
from tensorkeep.paths import checked_path
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import write_small
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.train.data.batches import check_weights
from tensorkeep.train.data.corpus import STDIN, STDLIB, open_source
from tensorkeep.train.data.dataset import (
    FILE,
    TRAIN,
    VALIDATION,
    Dataset,
    Layout,
    MixturePart,
    Origin,
)
from tensorkeep.train.data.documents import Reading, SplitRule
from tensorkeep.train.data.prepare import Prepared, is_prepared, is_replaceable, learner_of, prepare
from tensorkeep.train.data.token_files import layout_of, recorded_path, splits_of, token_files
from tensorkeep.train.data.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_COPIED_AT_ONCE = 1 << 22
"""Tokens."""


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
    """Return a source, or those of a mixture, as absolute paths where they exist: to be found from any folder."""
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
) -> Prepared:
    """Prepare a single source as `prepare` does, or a mixture of prepared data and other sources.

    All have one tokenizer: that of the prepared data, else one that is made for all sources together. Prepared data is
    copied, so that the result needs nothing else.

    Parameters
    ----------
    source : str
        A source of `prepare`, or a mixture; see `parse_mixture`.
    out, tokenizer, vocab_size, overwrite, progress, **options
        As of `prepare`.

    Returns
    -------
    Prepared

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
        for leftover in commit.path.glob("part-*"):
            shutil.rmtree(leftover)
        write_small(commit.path / FILE, checksummed_json.seal(layout))
        commit.publish()
        return Prepared(commit.destination, layout.description(shared))


def _refuse_mixtures(weights: dict[str, float]) -> None:
    """Refuse prepared data that is a mixture; the remedy is the mixture of all sources, with their weights."""
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
    """Return the tokenizer of the prepared data among some sources, else one for all of them."""
    prepared = {name: Dataset.open(name).tokenizer for name in names if is_prepared(name)}
    for name, tokenizer in prepared.items():
        first = next(iter(prepared))
        if tokenizer.digest != prepared[first].digest:
            raise UsageError(
                f"was prepared with other tokens ({tokenizer.name}) than {first} ({prepared[first].name})",
                path=name,
                remedy="prepare both with one tokenizer: --tokenizer from:FOLDER takes that of prepared data",
            )
    if prepared:
        return next(iter(prepared.values()))
    learn = learner_of(choice, vocab_size)
    if learn.reads and STDIN in names:
        raise UsageError(
            "standard input can be read once, and a mixture whose tokenizer learns from its sources reads them twice",
            path=STDIN,
            remedy="write it to a file, or give a tokenizer that does not learn, such as --tokenizer byte",
        )
    source_options = {name: options[name] for name in ("encoding", "field") if name in options}

    def documents() -> Iterator[Iterator[str]]:
        for name in names:
            with open_source(name, **source_options) as corpus:
                yield from (each.texts for each in Reading(corpus, Meter(1, None)).documents())

    return learn(documents() if learn.reads else iter(()), True)


def _mix(parts: list[Dataset], weights: list[float], names: list[str], source: str, folder: Path) -> Layout:
    """Write the token files of a mixture; return its description."""
    tokenizer = parts[0].tokenizer
    # As many validation tokens as every source has for its weight.
    most = min(len(part.validation) / weight for part, weight in zip(parts, weights, strict=True))
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
                for begin in range(0, len(tokens), _COPIED_AT_ONCE):
                    files[split].add(np.array(tokens[begin : begin + _COPIED_AT_ONCE]))
        counts = [part.description["splits"][TRAIN]["documents"] for part in parts]
        documents = None if None in counts else sum(counts)
        splits = splits_of(files, {TRAIN: documents, VALIDATION: None})
    origins = [part.description["source"] for part in parts]
    origin = Origin(
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
