"""``tensorkeep data``: tokenize text for a training run, and show prepared data."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from chatgot.data.corpus import DEFAULT_FIELD
from chatgot.data.dataset import SPLITS, Dataset
from chatgot.data.prepare import prepare as write_data
from tensorkeep.ext import counted, format_bytes
from tensorkeep.ext.cli import DEFAULT, Output, Switch, Table, print_lines

# Characters of the text that ``data info`` shows.
_SAMPLE = 200


def _no_flag(kind: type, value: str) -> None:
    # `-` is standard input; any other word that starts with a dash is a mistyped option.
    if value.startswith("-") and value != "-":
        raise ValueError(f"unknown option {value}")


@Parameter(name="*")
@dataclass(frozen=True)
class TextOptions:
    """The options of commands that read text.

    Attributes
    ----------
    encoding
        The encoding of the text; invalid bytes are an error.
    field
        The field of the lines of .jsonl files, or the column of tables, that holds the text.
    """

    encoding: str = "utf-8"
    field: str = DEFAULT_FIELD


@Parameter(name="*")
@dataclass(frozen=True)
class PrepareOptions(TextOptions):
    """The options of ``data prepare``, with the names of `chatgot.data.prepare.prepare`.

    Attributes
    ----------
    tokenizer
        Characters, bytes, byte-pair encoding trained on this text, a vocabulary of tiktoken that is on this machine, or
        the tokenizer of a run, of a Hugging Face model or of a folder of prepared data.
    vocab_size
        For bpe: the largest size of the vocabulary; 4096 by default.
    validation
        The fraction of the text, or of its documents, that is used for validation.
    seed
        The seed of the split into training and validation.
    conversations
        Each line of the .jsonl file is a conversation, and only its answers are trained; by default the first line
        decides.
    processes
        How many processes tokenize; by default all processors do for bpe and tiktoken, if the text is large. The result
        is the same.
    overwrite
        Replace existing prepared data.
    """

    tokenizer: Annotated[str, Parameter(metavar="char|byte|bpe|tiktoken:NAME|from:FOLDER")] = "char"
    vocab_size: int | None = None
    validation: float = 0.1
    seed: int = 0
    conversations: Annotated[bool, Switch] = False
    processes: int | None = None
    overwrite: Annotated[bool, Switch] = False


TEXT, DEFAULT_OPTIONS = TextOptions(), PrepareOptions()


def prepare(
    source: Annotated[str, Parameter(allow_leading_hyphen=True, validator=_no_flag)],
    /,
    *,
    out: Path,
    options: PrepareOptions = DEFAULT_OPTIONS,
    output: Output = DEFAULT,
) -> None:
    """Tokenize text for a training run.

    Parameters
    ----------
    source
        A file, a folder, a pattern in quotes such as 'books/*.txt', a dataset that Hugging Face's datasets saved
        (save_to_disk), - for standard input, or stdlib for the sources of Python's standard library. A .jsonl file has
        one document on each line, a .parquet file one in each row. A mixture is books:0.7,web:0.3 with such sources or
        prepared folders; the numbers are fractions of the training windows.
    out
        The folder to create.
    """
    # None lets the first line decide; the flag cannot say no.
    given = vars(options) | {"conversations": options.conversations or None}
    with output.meter(f"preparing {source}") as progress:
        made = write_data(source, out, progress=progress, **given)
    # In the document as well, so that scripts show the same command.
    following = f"tensorkeep train shakespeare-char-cpu --data {shlex.quote(str(out))}"
    output.show(
        {**made.as_dict(), "next": following},
        lambda: _print_about(out, made.description, "", f"next: {following}"),
    )


def info(directory: Path, /, *, verify: Annotated[bool, Switch] = False, output: Output = DEFAULT) -> None:
    """Show the contents of a folder of prepared data.

    Parameters
    ----------
    directory
        The folder.
    verify
        Read and check all tokens.
    """
    with output.meter(f"verifying {directory}") as progress:
        dataset = Dataset.open(directory, verify=verify, progress=progress)
    # Several tokens can make up one character, so more tokens are decoded than characters are shown.
    sample = dataset.tokenizer.decode(dataset.train[: 4 * _SAMPLE])[:_SAMPLE]
    document = {"path": str(directory), **dataset.description, "verified": verify, "sample": sample}
    verified = ["verified: the checksum is right and all tokens are in the vocabulary"] if verify else []
    output.show(document, lambda: _print_about(directory, document, *verified, "", *sample.splitlines()))


def _print_about(folder: Path, about: dict[str, Any], *more: str) -> None:
    source = about["source"]
    text = f"{format_bytes(source['bytes'])} of {source['encoding']}, {counted(source['characters'], 'character')}"
    files = f"{counted(source['files'], 'file')}" if source["kind"] != "stdin" else "standard input"
    print_lines(
        f"{folder}: {about['tokenizer']} tokens of {source['spec']} ({files}, {text})",
        f"vocabulary of {about['vocab_size']:,}, {about['dtype']}, fingerprint {about['fingerprint']}",
        "",
    )
    columns = ["tokens"] if source["documents"] is None else ["tokens", "documents"]
    counts = ((split, (about["splits"][split][column] for column in columns)) for split in SPLITS)
    rows = [(split, *("-" if each is None else f"{each:,}" for each in found)) for split, found in counts]
    Table(("split", *(f">{column}" for column in columns)), rows).show()
    # A dataset of one source has no weights.
    if mixture := about.get("mixture"):
        print_lines("")
        parts = [(part["source"], f"{part['weight']:.1%}", f"{part['tokens']:,}") for part in mixture]
        Table(("source", ">weight", ">tokens"), parts).show()
    print_lines(*more)
