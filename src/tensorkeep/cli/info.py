"""``tensorkeep info`` and ``tensorkeep ls``: the contents of a checkpoint, without its data."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.checkpoint.info import InfoReport, Total, describe
from tensorkeep.checkpoint.info import info as read_info
from tensorkeep.checkpoint.log import log
from tensorkeep.cli.addresses import checkpoint_at
from tensorkeep.cli.log import print_summary
from tensorkeep.cli.options import Allow, Endpoint, InputFormat, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, ratio
from tensorkeep.formats.base import Entry
from tensorkeep.runs.address import steps_of_run
from tensorkeep.state import names
from tensorkeep.units import counted, format_bytes, format_moment

_MOST_RANKS = 16
"""Ranks that are listed one by one."""


def info(
    path: str,
    /,
    *,
    largest: Annotated[int, Parameter(validator=Number(gte=0))] = 10,
    format: InputFormat = None,
    allow: Allow = None,
    endpoint: Endpoint = None,
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
    if steps_of_run(path):
        run = log(path)
        output.show(run.summary(), lambda: print_summary(run))
        return
    path = checkpoint_at(path, output)
    report = read_info(path, format=format, allow=allow)
    output.show(report.as_dict(largest=largest), lambda: _print_info(report, largest))


def ls(
    path: str,
    /,
    *globs: str,
    long: Annotated[bool, Switch, Parameter(name=["--long", "-l"])] = False,
    format: InputFormat = None,
    allow: Allow = None,
    endpoint: Endpoint = None,
    output: Output = DEFAULT,
) -> None:
    """List the tensors of a checkpoint.

    Parameters
    ----------
    path
        The checkpoint, or a step of a run: RUN for the last one, RUN@1200, RUN@best, RUN@best:METRIC.
    globs
        Only the tensors whose names match one of these, such as 'model.layers.0.*'.
    long
        Also show the part of the state that each tensor belongs to, and the tensor whose storage it shares.
    """
    path = checkpoint_at(path, output)
    report = read_info(path, format=format, allow=allow)
    by_name = {entry.name: entry for entry in report.entries}
    every = [*by_name, *report.placeholders]
    chosen = names.select(every, globs) if globs else every
    entries = [by_name[name] for name in chosen if name in by_name]
    unread = {name: what for name, what in report.placeholders.items() if name in chosen}
    tensors = [describe(entry) for entry in entries]
    document = {"path": path, "format": report.format, "tensors": tensors, "placeholders": unread}
    output.show(document, lambda: _print_list(entries, unread, long=long))


def _print_list(entries: list[Entry], unread: dict[str, str], *, long: bool) -> None:
    _entries(entries, long=long).show()
    _print_placeholders(unread)


def _print_placeholders(unread: dict[str, str]) -> None:
    if unread:
        print("\ncannot be read:")
        Table(("name", "what"), list(unread.items())).show()


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
        _entries(report.largest(largest)).show()
    _print_placeholders(report.placeholders)
    if report.metadata:
        print("\nmetadata:")
        Table(("key", "value"), [(key, _plain(value)) for key, value in report.metadata.items()]).show()


def _ranks(ranks: list[dict[str, Any]]) -> Table:
    """Return the fragments of a checkpoint that many ranks saved, the first ones if there are very many."""
    rows = [(each["fragment"], f"{each['boxes']:,}", format_bytes(each["bytes"])) for each in ranks[:_MOST_RANKS]]
    if len(ranks) > _MOST_RANKS:
        rest = ranks[_MOST_RANKS:]
        boxes, nbytes = (sum(each[key] for each in rest) for key in ("boxes", "bytes"))
        rows.append((f"{counted(len(rest), 'more rank')}", f"{boxes:,}", format_bytes(nbytes)))
    return Table(("fragment", ">boxes", ">files"), rows)


def _headline(report: InfoReport) -> list[str]:
    """Return the format and its properties as phrases."""
    files, version = report.details.get("files"), report.details.get("version")
    phrases = [report.format if version is None else f"{report.format} {version}"]
    for key, value in report.details.items():
        if key in ("files", "version", "step", "history", "space", "ranks", "layouts", "unused_files"):
            continue
        if key.endswith("_bytes") and isinstance(value, int):
            phrases.append(f"{key.removesuffix('_bytes')} {format_bytes(value)}")
        else:
            phrases.append(f"{key.replace('_', ' ')} {_plain(value)}")
    if ranks := report.details.get("ranks"):
        phrases.append(f"saved by {counted(len(ranks), 'rank')}")
    return phrases + ([counted(len(files), "file")] if files else [])


def _history(details: dict[str, Any]) -> Iterator[str]:
    """Yield the step, its own bytes, and its bytes on disk if other steps share its files."""
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
    return Table(
        (what, ">tensors", ">elements", ">raw", ">stored", ">ratio"),
        [
            (
                name,
                f"{total.tensors:,}",
                f"{total.elements:,}",
                format_bytes(total.nbytes),
                format_bytes(total.stored_bytes),
                ratio(total.nbytes, total.stored_bytes),
            )
            for name, total in sorted(totals.items(), key=lambda item: -item[1].nbytes)
        ],
        spare=("elements", "ratio"),
    )


def _entries(entries: list[Entry], *, long: bool = False) -> Table:
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
    headings: tuple[str, ...] = ("name", "=dtype", "=shape", ">size", ">stored", "=codec", "=file")
    if long:
        headings += ("part", "alias of")
        rows = [(*row, entry.part, entry.alias_of or "") for row, entry in zip(rows, entries, strict=True)]
    return Table(headings, rows, spare=("dtype", "stored", "codec", "file"))
