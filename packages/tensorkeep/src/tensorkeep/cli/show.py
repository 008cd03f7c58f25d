"""``tensorkeep show``: a checkpoint, a run, or two of either as one page of HTML, and a summary."""

import os
import re
import webbrowser
from pathlib import Path, PurePath
from typing import Annotated

from cyclopts import Parameter

from tensorkeep.cli.checkpoints import READ, InputFormat, ReadOptions, checkpoint_at
from tensorkeep.cli.options import SIZE, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, print_verdict
from tensorkeep.pages.page import SHOW, PageSubject, write_page
from tensorkeep.pages.rendering import check_installed, check_page
from tensorkeep.pages.show import read_subject
from tensorkeep.pages.statistics import DEFAULT_SAMPLE
from tensorkeep.runs.address import split_address
from tensorkeep.units import format_bytes

_TONES = {"good": True, "bad": False}
# Columns that a narrow terminal may leave out.
_SPARE = ("tensors", "ratio", "different")


def show(
    path: str,
    other: str | None = None,
    /,
    *,
    out: Path | None = None,
    sample: Annotated[int, SIZE, Parameter(show_default=lambda _: "2GiB")] = DEFAULT_SAMPLE,
    open: Annotated[bool, Switch] = False,
    format: InputFormat = None,
    options: ReadOptions = READ,
    output: Output = DEFAULT,
) -> None:
    """Write a page about a checkpoint, a run, or two of either, and print a summary.

    The page is one file, and needs no network. The page of a checkpoint has a map of its modules, and shape, values,
    range, NaN and codec of every tensor; the page of a run has its figures, the sizes of its steps, and how far its
    layers moved; the page of two checkpoints has their differences; the page of two runs has their figures in the same
    charts.

    Parameters
    ----------
    path
        A checkpoint, the folder of a run, or a step of a run: RUN@latest, RUN@1200, RUN@best.
    other
        A second checkpoint, or a second run, to compare with. To compare the weights of two runs, name the steps:
        RUN@latest.
    out
        The page to write; by default named like the checkpoint, in this folder. Only such a page is replaced.
    sample
        Read about this much for the statistics of a checkpoint or run: of large tensors some blocks, evenly spread.
    open
        Open the page in a browser.
    """
    # Before reading, which may take minutes.
    check_installed(SHOW)
    page = out or _page_of(path, other)
    check_page(page, SHOW)
    given = [each for each in (path, other) if each is not None]
    with output.meter("comparing" if other is not None else f"reading {path}") as progress:
        subject = read_subject(
            given,
            lambda each: checkpoint_at(each, output),
            sample=sample,
            format=format,
            progress=progress,
            **options.arguments,
        )
    nbytes = write_page(page, subject.page())
    # The document of a large checkpoint takes seconds, and is for --json only.
    document = {**subject.as_dict(), "page": str(page)} if output.json else {}
    output.show(document, lambda: _print(subject, page, nbytes))
    if open:
        webbrowser.open(page.absolute().as_uri())


def _page_of(path: str, other: str | None) -> Path:
    addresses = [split_address(each) for each in (path, other) if each is not None]
    # The path may be `.` or `..`, which are no names.
    names = [(PurePath(os.path.abspath(place)).name, step) for place, step in addresses]
    words = "-and-".join(f"{name}-{step}" if step else name for name, step in names)
    # Addresses have characters that not every file system and shell takes. A leading dot would hide the page.
    return Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '_', words).strip('.') or 'checkpoint'}.html")


def _print(subject: PageSubject, page: Path, nbytes: int) -> None:
    print_lines(subject.heading)
    for tone, text in subject.findings():
        if tone in _TONES:
            first, _, rest = text.partition(" ")
            print_verdict(first, f" {rest}", good=_TONES[tone])
        else:
            print_lines(text)
    print_lines(*filter(None, [subject.note]))
    table = subject.summary()
    if table.rows:
        print()
        spare = tuple(name for name in _SPARE if f">{name}" in table.headings)
        Table(table.headings, table.texts(), spare=spare).show()
    print_lines("", f"wrote {page} ({format_bytes(nbytes)})")
