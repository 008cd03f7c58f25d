"""``tensorkeep diff``: how two checkpoints differ."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.checkpoint.diff import DiffReport, TensorDiff
from tensorkeep.checkpoint.diff import diff as compare
from tensorkeep.cli.addresses import checkpoint_at
from tensorkeep.cli.options import AtLeastOne, Endpoint, Globs, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.reading import READING, Reading
from tensorkeep.cli.text import Table, print_lines, print_verdict
from tensorkeep.errors import UsageError
from tensorkeep.units import counted

Entry = TypeVar("Entry")

Tolerance = Annotated[float, Parameter(validator=Number(gte=0))]


def diff(
    a: str,
    b: str,
    /,
    *,
    atol: Tolerance = 0.0,
    rtol: Tolerance = 0.0,
    select: Globs = None,
    by_layer: Annotated[bool, Switch] = False,
    depth: Annotated[int | None, AtLeastOne] = None,
    top: Annotated[int, Parameter(validator=Number(gte=0))] = 20,
    stat: Annotated[bool, Switch] = False,
    reading: Reading = READING,
    endpoint: Endpoint = None,
    output: Output = DEFAULT,
) -> int:
    """Compare two checkpoints of any format; exit code 1 if they differ.

    Parameters
    ----------
    a
        The first checkpoint, or a step of a run: RUN for the last one, RUN@1200, RUN@best, RUN@best:METRIC.
    b
        The second checkpoint.
    atol
        Elements are equal when |a - b| <= atol + rtol * |b|. Without both, their bits are compared.
    rtol
        See --atol.
    select
        Compare only tensors whose names match this glob, without plain values; may be repeated.
    by_layer
        Show layers instead of tensors: a name up to its first number (model.blocks.3), or without its last component.
    depth
        With --by-layer: show layers by this many components of the names.
    top
        Show this many entries of each list, those that changed most first; 0 shows all.
    stat
        Show the totals in one line instead of the lists.
    """
    if depth is not None and not by_layer:
        raise UsageError("--depth is for --by-layer", remedy="give both, or neither")
    a, b = checkpoint_at(a, output), checkpoint_at(b, output)
    with output.meter("comparing") as progress:
        report = compare(a, b, atol=atol, rtol=rtol, select=select, progress=progress, **vars(reading))
    output.show(report.as_dict(depth=depth), lambda: _print_report(report, _Shown(top, by_layer, depth, stat)))
    return 0 if report.equal else 1


class _Shown(NamedTuple):
    """What of a report is printed."""

    top: int
    by_layer: bool
    depth: int | None
    stat: bool

    def cut(self, entries: Sequence[Entry]) -> tuple[Sequence[Entry], list[str]]:
        """Return the first entries, and the line that says how many are left out."""
        shown = entries[: self.top] if self.top else entries
        left = len(entries) - len(shown)
        return shown, [f"and {left:,} more (--top 0 shows all)"] if left else []


def _print_report(report: DiffReport, shown: _Shown) -> None:
    values = f"; {counted(len(report.values), 'plain value')} changed" if report.values else ""
    if report.placeholders:
        values += f"; {counted(len(report.placeholders), 'value')} not compared"
    tensors = f"tensors: {report.summary}{values}"
    verdict = "same" if report.equal else "different"
    totals = _totals(report.total) if report.changed else ""
    if shown.stat:
        print_verdict(verdict, f": {tensors}" + (f"; {totals}" if totals else ""), good=report.equal)
        return
    print_verdict(verdict, f": {report.a} and {report.b}: {tensors}", good=report.equal)
    print_lines(*([f"of the changed tensors, {totals}"] if totals else []))
    _print_lists(report, shown)


def _print_lists(report: DiffReport, shown: _Shown) -> None:
    if report.changed:
        layers = report.by_layer(shown.depth) if shown.by_layer else report.changed
        _print_diffs("changed layers" if shown.by_layer else "changed", layers, shown)
    if report.converted:
        types = {each.name: f"{each.a} -> {each.b}" for each in report.retyped}
        named = [replace(each, name=f"{each.name}  ({types[each.name]})") for each in report.converted]
        _print_diffs("of another dtype, compared by value", named, shown)
    for title, mismatches in (("reshaped", report.reshaped), ("plain values", report.values)):
        if mismatches:
            print(f"\n{title}:")
            entries, more = shown.cut(mismatches)
            Table(("name", "first", "second"), [(each.name, *each.texts) for each in entries]).show()
            print_lines(*more)
    for title, names in (
        ("added (only in the second)", report.added),
        ("removed (only in the first)", report.removed),
        ("not compared, because they cannot be read (--select '*' leaves them out)", report.placeholders),
    ):
        if names:
            first, more = shown.cut(names)
            print_lines("", f"{title}:", *first, *more)


def _print_diffs(title: str, diffs: Sequence[TensorDiff], shown: _Shown) -> None:
    print(f"\n{title}:")
    entries, more = shown.cut(diffs)
    headings = ("name", ">elements", ">different", ">rel. L2", ">cosine", ">max |a-b|")
    rows = [
        (
            each.name,
            f"{each.elements:,}",
            _percent(each.share),
            f"{each.relative_l2:.3g}" if each.floating else "-",
            "-" if each.cosine is None or not each.floating else f"{each.cosine:.6f}",
            f"{each.largest:.4g}",
        )
        for each in entries
    ]
    Table(headings, rows, spare=("elements", "cosine")).show()
    print_lines(*more)


def _totals(total: TensorDiff) -> str:
    differ = f"{total.different:,} of {total.elements:,} elements differ ({_percent(total.share)})"
    if not total.floating:
        return differ
    cosine = "" if total.cosine is None else f", cosine {total.cosine:.6f}"
    distances = f"relative L2 {total.relative_l2:.3g}{cosine}, max |a-b| {total.largest:.4g}"
    return f"{differ}; floating point: {distances}"


def _percent(fraction: float) -> str:
    if fraction == 0:
        return "0%"
    return f"{fraction:.2%}" if fraction >= 0.0001 else "<0.01%"
