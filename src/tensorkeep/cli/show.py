"""``tensorkeep show``: a checkpoint, a run or two checkpoints as one page of HTML, and a summary."""

import os
import re
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from tensorkeep.checkpoint.diff import diff as compare
from tensorkeep.cli.checkpoints import READ, InputFormat, ReadOptions, checkpoint_at
from tensorkeep.cli.options import SIZE, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, print_verdict, ratio
from tensorkeep.errors import UsageError
from tensorkeep.report.rendering import check_installed, check_page
from tensorkeep.runs.address import split_address, steps_of_run
from tensorkeep.show import checkpoint_page, difference_page, run_page
from tensorkeep.show.checkpoint import CheckpointContents, read_contents
from tensorkeep.show.modules import module_sums
from tensorkeep.show.page import SHOW, write_page
from tensorkeep.show.run import read_run
from tensorkeep.show.tensors.sampling import DEFAULT_SAMPLE
from tensorkeep.units import format_bytes

_MOST_MODULES = 12
_TONES = {"good": True, "bad": False}


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
    """Write a page about a checkpoint, a run or two checkpoints, and print a summary.

    The page is one file, and needs no network. Of a checkpoint it has a map of its modules, and shape, values, range,
    NaN and codec of each tensor; of a run its figures, the sizes of its steps, and how far its layers moved; of two
    checkpoints what changed.

    Parameters
    ----------
    path
        A checkpoint, the folder of a run, or a step of it: RUN@latest, RUN@1200, RUN@best.
    other
        A second checkpoint, to compare with.
    out
        The page to write; by default named like the checkpoint, in this folder. Only such a page is replaced.
    sample
        Read about this much for the statistics of a checkpoint or run: of large tensors some blocks, evenly spread.
    open
        Open the page in a browser.
    """
    check_installed(SHOW)
    page = out or _page_of(path, other)
    check_page(page, SHOW)
    is_run = other is None and bool(steps_of_run(path))
    if format is not None and (is_run or other is not None):
        raise UsageError("--format is for one checkpoint, not for a run or two", remedy="leave it out")
    if other is not None:
        shown = _two(path, other, options, output)
    elif is_run:
        shown = _run(path, sample, options, output)
    else:
        shown = _checkpoint(path, sample, format, options, output)
    nbytes = write_page(page, shown.page)
    document = {**shown.document(), "page": str(page)} if output.json else {}
    output.show(document, lambda: _print(shown, page, nbytes))
    if open:
        webbrowser.open(page.absolute().as_uri())


class _Shown(NamedTuple):
    """What is shown: the page, the document of --json, and for the terminal a heading, findings and tables."""

    page: str
    document: Callable[[], dict[str, Any]]
    heading: str
    findings: Sequence[tuple[str, str]]
    tables: Sequence[Table] = ()


def _page_of(path: str, other: str | None) -> Path:
    """Return the default name of the page, in this folder."""
    names = [PurePath(os.path.abspath(split_address(each)[0])).name for each in (path, other) if each is not None]
    steps = [split_address(each)[1] for each in (path, other) if each is not None]
    words = [f"{name}-{step}" if step else name for name, step in zip(names, steps, strict=True)]
    return Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '_', '-and-'.join(words)).strip('.') or 'checkpoint'}.html")


def _checkpoint(path: str, sample: int, format: str | None, options: ReadOptions, output: Output) -> _Shown:
    place = checkpoint_at(path, output)
    with output.meter(f"reading {path}") as progress:
        contents = read_contents(place, sample=sample, format=format, progress=progress, **options.arguments)
    info = contents.info
    return _Shown(
        checkpoint_page.checkpoint_page(contents),
        contents.as_dict,
        f"{info.path}: {info.format}",
        [*checkpoint_page.findings(contents), ("", contents.sample.text)],
        [_modules(contents)],
    )


def _modules(contents: CheckpointContents) -> Table:
    """Return the bytes of the largest modules."""
    rows = [
        (
            each.name,
            f"{each.tensors:,}",
            format_bytes(each.nbytes),
            format_bytes(each.stored_bytes),
            ratio(each.nbytes, each.stored_bytes),
        )
        for each in module_sums(contents.stored, _MOST_MODULES)
    ]
    return Table(("module", ">tensors", ">raw", ">stored", ">ratio"), rows, spare=("tensors", "ratio"))


def _run(path: str, sample: int, options: ReadOptions, output: Output) -> _Shown:
    with output.meter(f"reading {path}") as progress:
        contents = read_run(path, sample=sample, progress=progress, **options.arguments)
    rows = [
        (f"{each.title}: {curve.name}" if len(each.curves) > 1 else each.title, *_figures(curve.points))
        for each in run_page.charts(contents)
        for curve in each.curves
    ]
    table = Table(("figure", ">first", ">last", ">smallest", ">largest"), rows)
    return _Shown(
        run_page.run_page(contents),
        contents.as_dict,
        contents.log.path,
        run_page.findings(contents),
        [table] if rows else [],
    )


def _figures(points: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    values = [value for _, value in points]
    return tuple(f"{value:.5g}" for value in (values[0], values[-1], min(values), max(values)))


def _two(path: str, other: str, options: ReadOptions, output: Output) -> _Shown:
    places = [checkpoint_at(each, output) for each in (path, other)]
    with output.meter("comparing") as progress:
        report = compare(*places, progress=progress, **options.arguments)
    parts = difference_page.by_part([layer for layer in report.by_layer() if layer.floating])
    layers = [layer for _, own in parts for layer in own][:_MOST_MODULES]
    rows = [(layer.name, f"{layer.relative_l2:.3g}", f"{layer.largest:.4g}", f"{layer.share:.2%}") for layer in layers]
    table = Table(("layer", ">rel. L2", ">max |a-b|", ">different"), rows, spare=("different",))
    return _Shown(
        difference_page.difference_page(report),
        lambda: {"kind": "difference", **report.as_dict()},
        f"{report.a} and {report.b}",
        difference_page.findings(report),
        [table] if rows else [],
    )


def _print(shown: _Shown, page: Path, nbytes: int) -> None:
    print_lines(shown.heading)
    for tone, text in shown.findings:
        if tone in _TONES:
            first, _, rest = text.partition(" ")
            print_verdict(first, f" {rest}", good=_TONES[tone])
        else:
            print_lines(text)
    for table in shown.tables:
        print()
        table.show()
    print_lines("", f"wrote {page} ({format_bytes(nbytes)})")
