"""``tensorkeep tune``: the fastest settings for saves in a folder, measured and written."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep import machine
from tensorkeep.bench.tune.checkpoint import DEFAULT_BYTES, DEFAULT_SECONDS, FEWEST_BYTES, Tuned, tune
from tensorkeep.bench.tune.tuned_file import check_writable, read_text, with_table, write_tuned
from tensorkeep.checkpoint.settings import FILE_NAME
from tensorkeep.cli.options import Size, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, printable, ratio
from tensorkeep.errors import NotFoundError, UsageError
from tensorkeep.units import counted, format_bytes, format_rate
from tensorkeep.version import __version__


def checkpoint(
    directory: Path = Path(),
    /,
    *,
    seconds: Annotated[float, Parameter(validator=Number(gt=0))] = DEFAULT_SECONDS,
    size: Size = DEFAULT_BYTES,
    source: Annotated[Path | None, Parameter(name="--from", metavar="CHECKPOINT")] = None,
    out: Path | None = None,
    dry_run: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Find the settings that save fastest in a folder.

    A state is saved repeatedly: raw and lossless, with direct I/O and through the page cache, then with more and fewer
    threads. Settings that are faster beyond the noise are written to tensorkeep.toml. A save uses that file only if it
    is given: settings= in Python, -C on the command line.

    Parameters
    ----------
    directory
        The folder to measure, where checkpoints will be saved; only tensorkeep.toml is left there.
    seconds
        About how long to measure, in seconds.
    size
        The size of the generated state; a smaller one is used on a slow disk.
    source
        Save the state of this checkpoint instead: the gain of lossless compression depends on the values.
    out
        The file to write; tensorkeep.toml in the folder by default. Its other content is kept.
    dry_run
        Show the file, and do not write it.
    """
    if size < FEWEST_BYTES:
        raise UsageError(
            f"--size {format_bytes(size)} is too small", remedy=f"give at least {format_bytes(FEWEST_BYTES)}"
        )
    if not directory.is_dir():
        raise NotFoundError("the folder does not exist", path=directory, remedy="give the folder that you save to")
    path = directory / FILE_NAME if out is None else out
    # A file that cannot be changed or written is refused before the measurement.
    with_table(read_text(path), {"compression": "none"}, [], path)
    if not dry_run:
        check_writable(path)
    with output.status("building the state") as status:
        tuned = tune(
            directory,
            seconds=seconds,
            nbytes=size,
            source=source,
            progress=lambda _, name: status(f"measuring: {name}"),
        )
    found = {"processor": machine.processor(), "storage": machine.storage(directory)}
    table, comments = tuned.choice.table(), _comments(tuned, found)
    if dry_run:
        text = with_table(read_text(path), table, comments, path)
    else:
        text = write_tuned(path, table, comments)
    document = {"directory": str(directory), **tuned.as_dict(), "environment": found}
    output.show(
        {**document, "file": str(path), "written": not dry_run, "text": text},
        lambda: _print(tuned, found, path, text if dry_run else None),
    )


def _machine(found: dict[str, Any]) -> str:
    cores = counted(found["processor"]["usable_cores"], "core")
    return f"{cores} of {found['processor']['model']}, {found['storage']['file_system'] or 'unknown file system'}"


def _comments(tuned: Tuned, found: dict[str, Any]) -> list[str]:
    """Return comments for the file: when, where and how its values were measured."""
    lines = [
        f"tensorkeep {__version__} tune checkpoint, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {_machine(found)}",
        f"{format_bytes(tuned.nbytes)}: {tuned.subject}",
        "uncompressed bytes per second until durable, median (lowest, highest):",
    ]
    for stage in tuned.stages:
        rows = [stage.row(setting) for setting in stage.settings]
        width = max(len(row["name"]) for row in rows)
        lines += [f"  {row['name'].ljust(width)}  {_rates(row)}  {row['verdict']}" for row in rows]
    return [printable(line) for line in [*lines, tuned.sentence()]]


def _rates(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return "-"
    return f"{format_rate(row['rate'], 1)} ({format_rate(row['rate_low'], 1)}, {format_rate(row['rate_high'], 1)})"


def _print(tuned: Tuned, found: dict[str, Any], path: Path, text: str | None) -> None:
    print_lines(f"{format_bytes(tuned.nbytes)}: {tuned.subject}", f"{_machine(found)}: {found['storage']['path']}")
    heads = ("=settings", ">durable save", ">smaller", ">relative to the first", "=verdict")
    for stage in tuned.stages:
        print()
        rows = [_cells(stage.row(setting), stage.nbytes) for setting in stage.settings]
        Table(heads, rows, spare=("smaller",)).show()
        print_lines(f"{counted(stage.rounds.count, 'round')}, each in random order: median (lowest, highest)")
    print_lines("", tuned.sentence())
    if text is None:
        print_lines(
            f"Written to {path}. To use it: tensorkeep.save(..., settings={str(path)!r}), and the same",
            f"for save_async and CheckpointManager; -C {path} for tensorkeep convert and train.",
        )
    else:
        print_lines(f"Not written; {path} would contain:", "", *text.splitlines())


def _cells(row: dict[str, Any], nbytes: int) -> tuple[str, ...]:
    found = row["comparison"]
    interval = f" ({found['low']:.2f}, {found['high']:.2f})" if found and found["low"] is not None else ""
    against = f"{found['gain']:.2f}x{interval}" if found else "-"
    return row["name"], _rates(row), ratio(nbytes, int(row["stored_bytes"] or 0)), against, row["verdict"]
