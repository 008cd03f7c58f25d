"""``tensorkeep info``: the contents of a checkpoint without its data, or the summary of a run."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

from tensorkeep.checkpoint.info import InfoReport, Total
from tensorkeep.checkpoint.info import info as read_info
from tensorkeep.checkpoint.log import log
from tensorkeep.cli.checkpoints import OPEN, InputFormat, OpenOptions, checkpoint_at
from tensorkeep.cli.log import print_summary
from tensorkeep.cli.ls import print_placeholders, print_values, tensor_table
from tensorkeep.cli.options import AtLeastZero
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, ratio
from tensorkeep.runs.address import steps_of_run
from tensorkeep.units import counted, format_bytes, format_moment

_MOST_VALUES = 20
# Further ranks are shown as one row.
_MOST_RANKS = 16
# Details that are not printed as phrases of the first line.
_OWN_LINES = ("files", "version", "step", "history", "space", "ranks", "layouts", "unused_files")


def info(
    path: str,
    /,
    *,
    largest: Annotated[int, AtLeastZero] = 10,
    format: InputFormat = None,
    options: OpenOptions = OPEN,
    output: Output = DEFAULT,
) -> None:
    """Show what a checkpoint contains, or sum up a training run; no tensor is read.

    Parameters
    ----------
    path
        The checkpoint, or a step of a run: RUN@latest, RUN@1200, RUN@best, RUN@best:METRIC. RUN alone is summed up.
    largest
        How many of the largest tensors to show.
    """
    # A run is not a checkpoint: without @STEP its steps are summed up.
    if steps_of_run(path):
        run = log(path)
        output.show(run.summary(), lambda: print_summary(run))
        return
    path = checkpoint_at(path, output)
    report = read_info(path, format=format, allow=options.allow)
    output.show(report.as_dict(largest=largest), lambda: _print_info(report, largest))


def _print_info(report: InfoReport, largest: int) -> None:
    total = report.total
    print_lines(f"{report.path}: {', '.join(_headline(report))}")
    summary = f"{counted(total.tensors, 'tensor')}, {counted(total.elements, 'element')}"
    stored = f"{format_bytes(total.stored_bytes)} stored ({ratio(total.nbytes, total.stored_bytes)})"
    print_lines(f"{summary}, {format_bytes(total.nbytes)} raw, {stored}")
    if report.coder:
        print_lines(f"coder: {report.coder}")
    if unused := report.details.get("unused_files"):
        print_lines(f"not read: {', '.join(unused)}")
    print_lines(*_history(report.details))
    for what, totals in (("dtype", report.by_dtype), ("part", report.by_part), ("codec", report.by_codec)):
        print()
        _totals(what, totals).show()
    if ranks := report.details.get("ranks"):
        print()
        _ranks(ranks).show()
    if layouts := report.details.get("layouts"):
        print("\nlayouts:")
        counts = Counter(layouts.values())
        Table(("layout", ">tensors"), [(layout, f"{count:,}") for layout, count in counts.most_common()]).show()
    if largest and report.entries:
        print("\nlargest:")
        tensor_table(report.largest(largest)).show()
    print_values(report.values, _MOST_VALUES)
    print_placeholders(report.placeholders)
    if report.metadata:
        print("\nmetadata:")
        Table(("key", "value"), [(key, _plain(value)) for key, value in report.metadata.items()]).show()


def _headline(report: InfoReport) -> list[str]:
    details = report.details
    phrases = [" ".join([report.format, *([str(details["version"])] if details.get("version") is not None else [])])]
    for key, value in details.items():
        if key in _OWN_LINES:
            continue
        if key.endswith("_bytes") and isinstance(value, int):
            phrases.append(f"{key.removesuffix('_bytes')} {format_bytes(value)}")
        else:
            phrases.append(f"{key.replace('_', ' ')} {_plain(value)}")
    if ranks := details.get("ranks"):
        phrases.append(f"saved by {counted(len(ranks), 'rank')}")
    files = details.get("files")
    return phrases + ([counted(len(files), "file")] if files else [])


def _history(details: dict[str, Any]) -> Iterator[str]:
    """Yield lines about a step of a run: what it wrote, and which bytes it shares with other steps."""
    step, history, space = details.get("step"), details.get("history"), details.get("space")
    if step:
        metrics = "".join(f", {name} {value}" for name, value in step["metrics"].items())
        yield f"step {step['number']}, saved {format_moment(step['saved_at'])}{metrics}"
    if history:
        linked = [f"{format_bytes(count)} of {origin}" for origin, count in history["linked_bytes"].items()]
        taken = f"; shares files of {counted(len(linked), 'earlier step')}: {', '.join(linked)}" if linked else ""
        chain = history["deepest_chain"]
        read = f"; a block is read through up to {counted(chain, 'delta')}" if chain else ""
        yield f"wrote {format_bytes(history['new_bytes'])}{taken}{read}"
    if space and (history or space["shared_bytes"]):
        own, shared = format_bytes(space["own_bytes"]), format_bytes(space["shared_bytes"])
        yield f"occupies {format_bytes(space['occupied_bytes'])}: {own} of its own, {shared} shared with others"


def _plain(value: Any) -> str:
    if isinstance(value, dict) and not any(isinstance(item, dict | list) for item in value.values()):
        return " ".join(f"{key} {item}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _totals(what: str, totals: dict[str, Total]) -> Table:
    rows = [
        (
            name,
            f"{total.tensors:,}",
            f"{total.elements:,}",
            format_bytes(total.nbytes),
            format_bytes(total.stored_bytes),
            ratio(total.nbytes, total.stored_bytes),
        )
        for name, total in sorted(totals.items(), key=lambda item: -item[1].nbytes)
    ]
    return Table((what, ">tensors", ">elements", ">raw", ">stored", ">ratio"), rows, spare=("elements", "ratio"))


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    rows = [(each["fragment"], f"{each['boxes']:,}", format_bytes(each["bytes"])) for each in ranks[:_MOST_RANKS]]
    if rest := ranks[_MOST_RANKS:]:
        boxes, nbytes = (sum(each[key] for each in rest) for key in ("boxes", "bytes"))
        rows.append((counted(len(rest), "more rank"), f"{boxes:,}", format_bytes(nbytes)))
    return Table(("fragment", ">boxes", ">files"), rows)
