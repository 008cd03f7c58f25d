"""``tensorkeep diff``: the differences of two checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from cyclopts import Parameter

from tensorkeep.checkpoint.diff import DiffReport, TensorDiff
from tensorkeep.checkpoint.diff import diff as compare
from tensorkeep.cli.checkpoints import READ, Globs, ReadOptions, checkpoint_at
from tensorkeep.cli.options import AtLeastOne, AtLeastZero, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, print_verdict
from tensorkeep.errors import UsageError
from tensorkeep.units import counted

Entry = TypeVar("Entry")
Tolerance = Annotated[float, AtLeastZero]


@Parameter(name="*")
@dataclass(frozen=True)
class DiffView:
    """The options that choose what is printed.

    Attributes
    ----------
    by_layer
        Show layers instead of tensors: a name up to its first number (model.blocks.3), or without its last component.
    depth
        With --by-layer: show layers by this many components of the names.
    top
        Show this many entries of each list, the largest changes first; 0 shows all.
    stat
        Show the totals in one line instead of the lists.
    """

    by_layer: Annotated[bool, Switch] = False
    depth: Annotated[int | None, AtLeastOne] = None
    top: Annotated[int, AtLeastZero] = 20
    stat: Annotated[bool, Switch] = False

    def cut(self, entries: Sequence[Entry]) -> tuple[Sequence[Entry], list[str]]:
        shown = entries[: self.top] if self.top else entries
        left = len(entries) - len(shown)
        return shown, [f"and {left:,} more (--top 0 shows all)"] if left else []


DEFAULT_VIEW = DiffView()


def diff(
    a: str,
    b: str,
    /,
    *,
    atol: Tolerance = 0.0,
    rtol: Tolerance = 0.0,
    select: Globs = None,
    view: DiffView = DEFAULT_VIEW,
    options: ReadOptions = READ,
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
        Compare only tensors with a name that matches this glob, and no plain values; may be repeated.
    """
    if view.depth is not None and not view.by_layer:
        raise UsageError("--depth is for --by-layer", remedy="give both, or neither")
    a, b = checkpoint_at(a, output), checkpoint_at(b, output)
    with output.meter("comparing") as progress:
        report = compare(a, b, atol=atol, rtol=rtol, select=select, progress=progress, **options.arguments)
    output.show(report.as_dict(depth=view.depth), lambda: _print_report(report, view))
    # As diff and cmp do.
    return 0 if report.equal else 1


def _print_report(report: DiffReport, view: DiffView) -> None:
    values = f"; {counted(len(report.values), 'plain value')} changed" if report.values else ""
    if report.placeholders:
        values += f"; {counted(len(report.placeholders), 'value')} not compared"
    tensors = f"tensors: {report.summary}{values}"
    verdict = "same" if report.equal else "different"
    totals = _totals(report.total) if report.changed else ""
    if view.stat:
        print_verdict(verdict, f": {tensors}" + (f"; {totals}" if totals else ""), good=report.equal)
        return
    print_verdict(verdict, f": {report.a} and {report.b}: {tensors}", good=report.equal)
    print_lines(*([f"of the changed tensors, {totals}"] if totals else []))
    _print_lists(report, view)


def _print_lists(report: DiffReport, view: DiffView) -> None:
    if report.changed:
        # All of them: not folded either.
        tensors = report.folded() if view.top else report.changed
        layers = report.by_layer(view.depth) if view.by_layer else tensors
        _print_diffs("changed layers" if view.by_layer else "changed", layers, view)
    if report.converted:
        # The dtypes stand with the name, because few tensors have them.
        types = {each.name: f"{each.a} -> {each.b}" for each in report.retyped}
        named = [replace(each, name=f"{each.name}  ({types[each.name]})") for each in report.converted]
        _print_diffs("of another dtype, compared by value", named, view)
    for title, mismatches in (("reshaped", report.reshaped), ("plain values", report.values)):
        if mismatches:
            print(f"\n{title}:")
            entries, more = view.cut(mismatches)
            Table(("name", "first", "second"), [(each.name, *each.texts) for each in entries]).show()
            print_lines(*more)
    for title, names in (
        ("added (only in the second)", report.added),
        ("removed (only in the first)", report.removed),
        ("not compared, because they cannot be read (--select '*' leaves them out)", report.placeholders),
    ):
        if names:
            first, more = view.cut(names)
            print_lines("", f"{title}:", *first, *more)


def _print_diffs(title: str, diffs: Sequence[TensorDiff], view: DiffView) -> None:
    print(f"\n{title}:")
    entries, more = view.cut(diffs)
    headings = ("name", ">elements", ">different", ">rel. L2", ">cosine", ">max |a-b|")
    rows = [
        (
            each.name,
            f"{each.elements:,}",
            _percent(each.share),
            f"{each.relative_l2:.3g}" if each.floating else "-",
            # A tensor of zeros has no direction.
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
    # 0.00% would look as if nothing differed.
    return f"{fraction:.2%}" if fraction >= 0.0001 else "<0.01%"
