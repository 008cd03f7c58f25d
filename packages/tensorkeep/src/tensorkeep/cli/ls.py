"""``tensorkeep ls``: the tensors of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from tensorkeep.checkpoint.info import describe, json_value, outermost_first, value_text
from tensorkeep.checkpoint.info import info as read_info
from tensorkeep.cli.checkpoints import OPEN, InputFormat, OpenOptions, checkpoint_at
from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.formats.base import Entry
from tensorkeep.state import names
from tensorkeep.units import format_bytes


def ls(
    path: str,
    /,
    *globs: str,
    long: Annotated[bool, Switch, Parameter(name=["--long", "-l"])] = False,
    format: InputFormat = None,
    options: OpenOptions = OPEN,
    output: Output = DEFAULT,
) -> None:
    """List the tensors and plain values of a checkpoint.

    Parameters
    ----------
    path
        The checkpoint, or a step of a run: RUN for the last one, RUN@1200, RUN@best, RUN@best:METRIC.
    globs
        List only tensors and values with a name that matches a glob, such as 'model.layers.0.*'.
    long
        Also show the part of the state that a tensor belongs to, and the tensor that it shares storage with.
    """
    path = checkpoint_at(path, output)
    report = read_info(path, format=format, allow=options.allow)
    by_name = {entry.name: entry for entry in report.entries}
    # Plain values, and values that cannot be read, have names as well, which globs may match.
    every = [*by_name, *report.placeholders, *report.values]
    chosen = dict.fromkeys(names.select(every, globs) if globs else every)
    entries = [by_name[name] for name in chosen if name in by_name]
    unread = {name: what for name, what in report.placeholders.items() if name in chosen}
    tensors = [describe(entry) for entry in entries]
    values = {name: value for name, value in report.values.items() if name in chosen}
    shown = {name: json_value(value) for name, value in values.items()}
    document = {"path": path, "format": report.format, "tensors": tensors, "values": shown, "placeholders": unread}

    def text() -> None:
        if entries or not values:
            tensor_table(entries, long=long).show()
        print_values(values)
        print_placeholders(unread)

    output.show(document, text)


def tensor_table(entries: Sequence[Entry], *, long: bool = False) -> Table:
    headings: tuple[str, ...] = ("name", "=dtype", "=shape", ">size", ">stored", "=codec", "=file")
    rows: list[tuple[str, ...]] = [
        (
            entry.name,
            entry.dtype.name,
            str(list(entry.shape)),
            format_bytes(entry.nbytes),
            format_bytes(entry.stored_bytes),
            entry.codec,
            entry.file,
        )
        for entry in entries
    ]
    if long:
        headings += ("part", "alias of")
        rows = [(*row, entry.part, entry.alias_of or "") for row, entry in zip(rows, entries, strict=True)]
    return Table(headings, rows, spare=("dtype", "stored", "codec", "file"))


def print_values(values: Mapping[str, Any], most: int | None = None) -> None:
    """Print plain values; with ``most``, so many of the outermost ones."""
    if not values:
        return
    listed = [*values] if most is None else outermost_first(values)[:most]
    print("\nplain values:")
    Table(("name", "value"), [(name, value_text(values[name])) for name in listed]).show()
    if more := len(values) - len(listed):
        print_lines(f"and {more:,} more (tensorkeep ls shows all)")


def print_placeholders(placeholders: Mapping[str, str]) -> None:
    if placeholders:
        print("\ncannot be read:")
        Table(("name", "what"), list(placeholders.items())).show()
