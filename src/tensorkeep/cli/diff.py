"""``tensorkeep diff``: how two checkpoints differ."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.checkpoint.inspect.comparing import TensorDiff
from tensorkeep.checkpoint.inspect.diff import DiffReport
from tensorkeep.checkpoint.inspect.diff import diff as compare
from tensorkeep.cli.addresses import checkpoint_at
from tensorkeep.cli.options import Allow, AtLeastOne, Globs, MemoryBudget, Switch, Threads
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, print_verdict
from tensorkeep.errors import UsageError
from tensorkeep.io.buffers import DEFAULT_BUDGET
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
    threads: Threads = None,
    memory_budget: MemoryBudget = DEFAULT_BUDGET,
    allow: Allow = None,
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
        report = compare(
            a,
            b,
            atol=atol,
            rtol=rtol,
            select=select,
            progress=progress,
            threads=threads,
            memory_budget=memory_budget,
            allow=allow,
        )
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
    counts = [
        (len(report.changed), "changed"),
        (len(report.reshaped), "reshaped"),
        (len(report.retyped), "of another dtype"),
        (len(report.added), "added"),
        (len(report.removed), "removed"),
        (report.identical, "identical"),
    ]
    summary = ", ".join(f"{count:,} {what}" for count, what in counts if count) or "no tensors"
    values = f"; {counted(len(report.values), 'plain value')} changed" if report.values else ""
    verdict = "same" if report.equal else "different"
    totals = _totals(report.total) if report.changed else ""
    if shown.stat:
        print_verdict(verdict, f": tensors: {summary}{values}" + (f"; {totals}" if totals else ""), good=report.equal)
        return
    print_verdict(verdict, f": {report.a} and {report.b}: tensors: {summary}{values}", good=report.equal)
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
            Table(("name", "first", "second"), [(m.name, _text(m.a), _text(m.b)) for m in entries]).show()
            print_lines(*more)
    for title, names in (("added (only in the second)", report.added), ("removed (only in the first)", report.removed)):
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


def _text(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, dict) and len(value) == 1:
        # A value that JSON does not have is stored under its type: {"float": "0.1"}.
        (value,) = value.values()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
