"""The page of a checkpoint: what was found, a treemap, totals, and a table of all tensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensorkeep.checkpoint.info import Total
from tensorkeep.formats.base import Entry as Tensor
from tensorkeep.report.html import facts_of
from tensorkeep.report.tables import Entry, ReportTable
from tensorkeep.show.checkpoint import CheckpointContents
from tensorkeep.show.modules import grouped, module_sums
from tensorkeep.show.page import Column, drawn_table, left_out_text, show_page, title_of
from tensorkeep.units import counted, format_bytes, format_moment

_COLOURS = 6
"""Colours of dtypes; further ones share the last."""

_NAMED, _MOST_MODULES = 3, 40

_OWN_LISTS = ("files", "layouts", "ranks")
"""Details with an entry for each file, tensor or rank."""

_MOST_FACTS, _LONGEST_FACT = 200, 1000

_COLUMNS = (
    Column("tensor", "name"),
    Column("dtype", "word"),
    Column("shape", "text"),
    Column("raw", "bytes", "bytes of its elements"),
    Column("stored", "bytes", "bytes in the checkpoint"),
    Column("ratio", "ratio", "raw bytes for each stored byte"),
    Column("codec", "word"),
    Column("values", "histogram"),
    Column("min", "number", "the smallest finite number"),
    Column("max", "number", "the largest finite number"),
    Column("mean", "number"),
    Column("std", "number", "standard deviation"),
    Column("zeros", "percent", "fraction of the numbers that are 0"),
    Column("NaN", "count"),
    Column("Inf", "count"),
    Column("view of", "text", "the tensor whose storage it shares"),
)


def findings(contents: CheckpointContents) -> list[tuple[str, str]]:
    """Return what a reader should know first, as (tone, sentence); the tone is ``"good"``, ``"bad"`` or empty."""
    total = contents.info.total
    summary = f"{counted(total.tensors, 'tensor')} with {counted(total.elements, 'element')}: "
    stored = format_bytes(total.stored_bytes)
    ratio = f" ({total.nbytes / total.stored_bytes:.2f}x smaller)" if total.nbytes > total.stored_bytes > 0 else ""
    found = [("", f"{summary}{format_bytes(total.nbytes)}, stored in {stored}{ratio}.")]
    sampled = " in what was read" if contents.sample.every > 1 else ""
    if bad := contents.not_finite:
        texts = [f"{entry.name} ({_not_finite(contents, entry)})" for entry in bad[:_NAMED]]
        more = f" and {len(bad) - _NAMED:,} more" if bad[_NAMED:] else ""
        holds = "tensor holds" if len(bad) == 1 else "tensors hold"
        found.append(("bad", f"{len(bad):,} {holds} values that are not finite{sampled}: {', '.join(texts)}{more}."))
    else:
        found.append(("good", f"All values are finite: neither NaN nor infinity was found{sampled}."))
    if zero := contents.zero:
        names = ", ".join(entry.name for entry in zero[:_NAMED])
        more = f" and {len(zero) - _NAMED:,} more" if zero[_NAMED:] else ""
        found.append(("", f"{counted(len(zero), 'tensor')} of zeros only{sampled}: {names}{more}."))
    return found


def _not_finite(contents: CheckpointContents, entry: Tensor) -> str:
    statistics = contents.statistics[entry.name]
    counts = ((statistics.nan, "NaN"), (statistics.infinite, "infinite"))
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def checkpoint_page(contents: CheckpointContents) -> str:
    """Return the page; MissingExtraError if jinja2 is not installed."""
    info = contents.info
    colours = colours_of(info.by_dtype)
    ordered = _most_important_first(contents)
    table = drawn_table(_COLUMNS, (_row(contents, entry) for entry in ordered), noun="tensor")
    left_out = ordered[len(ordered) - table.left_out :]
    maps = [("stored bytes", _map(info.entries, lambda entry: entry.stored_bytes, colours))]
    if info.total.nbytes != info.total.stored_bytes:
        maps.append(("raw bytes", _map(contents.stored, lambda entry: entry.nbytes, colours)))
    return show_page(
        "checkpoint.html.j2",
        title_of(info.path),
        {"tensors": table.json},
        path=info.path,
        about=_about(contents),
        findings=findings(contents),
        sample=contents.sample.text,
        maps=maps,
        legend=[
            (name, colours[name], f"{format_bytes(total.stored_bytes)} in {counted(total.tensors, 'tensor')}")
            for name, total in _largest_first(info.by_dtype)
        ],
        totals=[
            _sums("By module", contents.stored),
            _totals("dtype", info.by_dtype),
            _totals("codec", info.by_codec),
            _totals("part", info.by_part),
        ],
        left_out=left_out_text(
            table, "those that are not finite, then the largest", sum(entry.stored_bytes for entry in left_out)
        ),
        left_out_table=_sums("Tensors that are not listed, by module", left_out),
        metadata=_facts(info.metadata),
        details=_facts(_details(info.details)),
        files=[(name, format_bytes(size)) for name, size in _files(info.details)],
    )


def colours_of(totals: dict[str, Total]) -> dict[str, int]:
    """Return the number of the colour of each dtype, that with most bytes first."""
    return {name: min(place, _COLOURS - 1) for place, (name, _) in enumerate(_largest_first(totals))}


def _largest_first(totals: dict[str, Total]) -> list[tuple[str, Total]]:
    return sorted(totals.items(), key=lambda item: -item[1].nbytes)


def _most_important_first(contents: CheckpointContents) -> list[Tensor]:
    """Return the tensors that are not finite, then the largest: what a bounded table shows."""
    bad = {entry.name: place for place, entry in enumerate(contents.not_finite)}
    return sorted(contents.info.entries, key=lambda entry: (bad.get(entry.name, len(bad)), -entry.nbytes))


def _row(contents: CheckpointContents, entry: Tensor) -> list[Any]:
    shape = "x".join(map(str, entry.shape)) or "scalar"
    described = [entry.name, entry.dtype.name, shape, entry.nbytes]
    if entry.alias_of is not None:
        return [*described, 0, None, entry.codec, *[None] * 8, entry.alias_of]
    found = contents.statistics[entry.name]
    ratio = entry.nbytes / entry.stored_bytes if entry.stored_bytes else None
    zeros = found.zeros / found.numbers if found.numbers else None
    measured = [found.histogram, found.least, found.largest, found.mean, found.std, zeros, found.nan, found.infinite]
    return [*described, entry.stored_bytes, ratio, entry.codec, *measured, None]


def _map(entries: Iterable[Tensor], size: Callable[[Tensor], int], colours: dict[str, int]) -> list[dict[str, Any]]:
    """Return the treemap for the template: groups and cells with their style, texts and search."""
    listed = list(entries)
    total = sum(map(size, listed)) or 1
    return [
        {
            "label": group.label,
            "labelled": group.labelled,
            "title": f"{group.label}: {format_bytes(group.nbytes)}, {group.nbytes / total:.1%}",
            "style": _style(*group.place),
            "cells": [
                {
                    "label": each.cell.label if each.labelled else "",
                    "size": format_bytes(each.cell.nbytes) if each.labelled else "",
                    "title": f"{(each.cell.path or each.cell.label).removesuffix('.')}: {each.cell.dtype}, "
                    f"{counted(each.cell.tensors, 'tensor')}, {format_bytes(each.cell.nbytes)}, "
                    f"{each.cell.nbytes / total:.1%}",
                    "search": each.cell.search,
                    "colour": colours[each.cell.dtype],
                    "style": _style(*each.place),
                }
                for each in group.cells
            ],
        }
        for group in grouped(listed, size)
    ]


def _style(left: float, top: float, width: float, height: float) -> str:
    return f"left:{left:.3f}%;top:{top:.3f}%;width:{width:.3f}%;height:{height:.3f}%"


def _totals(what: str, totals: dict[str, Total]) -> ReportTable:
    rows = [
        (
            Entry(name),
            Entry(f"{total.tensors:,}", total.tensors),
            Entry(f"{total.elements:,}", total.elements),
            Entry(format_bytes(total.nbytes), total.nbytes),
            Entry(format_bytes(total.stored_bytes), total.stored_bytes),
            Entry(f"{total.nbytes / total.stored_bytes:.2f}x" if total.stored_bytes else "-"),
        )
        for name, total in _largest_first(totals)
    ]
    return ReportTable(f"By {what}", (f"={what}", ">tensors", ">elements", ">raw", ">stored", ">ratio"), rows)


def _sums(title: str, entries: Iterable[Tensor]) -> ReportTable:
    rows = [
        (
            Entry(each.name),
            Entry(f"{each.tensors:,}", each.tensors),
            Entry(format_bytes(each.nbytes), each.nbytes),
            Entry(format_bytes(each.stored_bytes), each.stored_bytes),
        )
        for each in module_sums(entries, _MOST_MODULES)
    ]
    return ReportTable(title, ("module", ">tensors", ">raw", ">stored"), rows)


def _about(contents: CheckpointContents) -> str:
    info = contents.info
    version = info.details.get("version")
    words = [f"A checkpoint of format {info.format}{'' if version is None else f' {version}'}"]
    if files := info.details.get("files"):
        words.append(counted(len(files), "file"))
    if (step := info.details.get("step")) is not None:
        words.append(f"step {step['number']}")
    if info.coder:
        words.append(f"decoded by the {info.coder} coder")
    return ", ".join(words) + "."


def _details(details: dict[str, Any]) -> dict[str, Any]:
    """Return the details without those that are listed elsewhere, with times and bytes as texts."""
    found = {key: value for key, value in details.items() if key not in _OWN_LISTS}
    if step := found.get("step"):
        found["step"] = {**step, "saved_at": format_moment(step["saved_at"])}
    if history := found.get("history"):
        linked = {origin: format_bytes(count) for origin, count in history["linked_bytes"].items()}
        found["history"] = {**history, "linked_bytes": linked}
    return found


def _facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return plain values as (name, text), of a bounded size."""
    facts = facts_of(values)
    shown = [(name[:_LONGEST_FACT], text[:_LONGEST_FACT]) for name, text in facts[:_MOST_FACTS]]
    return shown + ([("more", f"{len(facts) - _MOST_FACTS:,} values")] if len(facts) > _MOST_FACTS else [])


def _files(details: dict[str, Any]) -> Iterator[tuple[str, int]]:
    files = details.get("files")
    if isinstance(files, dict):
        yield from sorted(files.items(), key=lambda item: -item[1])[:_MOST_FACTS]
