"""``tensorkeep diff``: how two checkpoints differ."""

import json
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.checkpoint.inspect.diff import DiffReport
from tensorkeep.checkpoint.inspect.diff import diff as compare
from tensorkeep.cli.addresses import checkpoint_at
from tensorkeep.cli.options import Globs, MemoryBudget, Threads
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.units import counted

Tolerance = Annotated[float, Parameter(validator=Number(gte=0))]


def diff(
    a: str,
    b: str,
    /,
    *,
    atol: Tolerance = 0.0,
    rtol: Tolerance = 0.0,
    select: Globs = None,
    threads: Threads = None,
    memory_budget: MemoryBudget = DEFAULT_BUDGET,
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
    """
    a, b = checkpoint_at(a, output), checkpoint_at(b, output)
    with output.meter("comparing") as progress:
        report = compare(
            a, b, atol=atol, rtol=rtol, select=select, progress=progress, threads=threads, memory_budget=memory_budget
        )
    output.show(report.as_dict(), lambda: _print_report(report))
    return 0 if report.equal else 1


def _print_report(report: DiffReport) -> None:
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
    print_lines(f"{verdict}: {report.a} and {report.b}: tensors: {summary}{values}")
    if report.changed:
        print("\nchanged:")
        rows = [
            (each.name, f"{each.elements:,}", f"{each.different:,}", _percent(each.share), f"{each.largest:.6g}")
            for each in report.changed
        ]
        Table(("name", ">elements", ">different", ">fraction", ">max |a-b|"), rows).show()
    for title, mismatches in (
        ("reshaped", report.reshaped),
        ("of another dtype", report.retyped),
        ("plain values", report.values),
    ):
        if mismatches:
            print(f"\n{title}:")
            Table(("name", "first", "second"), [(m.name, _text(m.a), _text(m.b)) for m in mismatches]).show()
    for title, names in (("added (only in the second)", report.added), ("removed (only in the first)", report.removed)):
        if names:
            print_lines("", f"{title}:", *names)


def _percent(fraction: float) -> str:
    return f"{fraction:.2%}" if fraction >= 0.0001 else "<0.01%"


def _text(value: Any) -> str:
    if isinstance(value, dict) and len(value) == 1:
        # A value that JSON does not have is stored under its type: {"float": "0.1"}.
        (value,) = value.values()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
