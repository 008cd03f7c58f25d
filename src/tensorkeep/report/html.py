"""The report as one page of HTML that opens anywhere: no request leaves it, and no name in it is taken for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from importlib import resources
from typing import Any

import msgspec

from tensorkeep.bench.results import Results, Subject
from tensorkeep.bench.results import printable as clean
from tensorkeep.errors import MissingExtraError
from tensorkeep.report import design_tables, tables
from tensorkeep.report.headline import completeness, headlines
from tensorkeep.report.origin_tables import improvements_table, isolated_table
from tensorkeep.report.plots.drawing import PALETTE, Plot
from tensorkeep.report.samples import GIB
from tensorkeep.report.sheet import Entry, Sheet, entry
from tensorkeep.report.wording import STATUS, measured_by, number, purpose, sentence
from tensorkeep.units import format_bytes

# What the first bytes of a report say, so that nothing else is ever replaced by one.
MARK = '<html lang="en" data-made-by="tensorkeep-report">'
_MOST_CELLS = 3000


def report_page(results: Results, plots: list[Plot]) -> str:
    """Return the page.

    Parameters
    ----------
    results : Results
    plots : list of Plot
        As `tensorkeep.report.plots.draw_plots` returns them.

    Raises
    ------
    MissingExtraError
        If jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        remedy = "pip install 'tensorkeep[bench]'"
        raise MissingExtraError("the page needs jinja2, which is not installed", remedy=remedy) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = _part("report.js")
    names = {plot.name for plot in plots}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(_part("template.html.j2")).render(
        mark=MARK,
        style=_part("report.css") + _palette(),
        script=script,
        script_hash=f"sha256-{digest}",
        plots={plot.name: (plot.title, themed(plot)) for plot in plots},
        # The six panels show all that the four show, and more.
        comparison=next((name for name in ("impact", "comparison", "three-way") if name in names), None),
        **_content(results),
    )


def themed(plot: Plot) -> str:
    """Return a figure's SVG for the page: as wide as its box, and its colours named, so that the page decides them."""
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    # Names of groups repeat from figure to figure, and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    for name, colour in PALETTE.items():
        body = body.replace(colour, f"var(--plot-{name})")
    return f'{head} role="img" aria-label="{plot.title}">{body}'


def _palette() -> str:
    colours = " ".join(f"--plot-{name}: {colour};" for name, colour in PALETTE.items() if name != "paper")
    return f":root {{ {colours} }}\n"


def _part(name: str) -> str:
    return resources.files("tensorkeep.report").joinpath("page", name).read_text(encoding="utf-8")


def _content(results: Results) -> dict[str, Any]:
    summary = results.summary
    experiment = results.experiment
    not_run, seen = tables.not_run_table(results), tables.seen_table(results)
    return {
        "title": clean(experiment.title or experiment.name),
        "about": clean(experiment.about or ""),
        "measured_by": measured_by(results),
        "incomplete": completeness(results),
        "headlines": headlines(results),
        "recommendations": [(purpose(one), sentence(one.text), _json(one.settings)) for one in summary.recommendations],
        "warnings": [(clean(one.text), clean(one.remedy)) for one in summary.warnings],
        "noise": tables.noise_lines(results),
        "overview": [isolated_table(results), improvements_table(results)],
        "verdicts": [tables.verdict_table(results, measure) for measure in results.primary()],
        "steps": design_tables.steps_tables(results),
        "effects": design_tables.effects_tables(results),
        "aliases": design_tables.aliases_lines(results),
        "interactions": design_tables.interactions_tables(results),
        "claims": design_tables.claims_table(results),
        "not_run": not_run if not_run.rows else None,
        "seen": seen if seen.rows else None,
        "environment": _facts(_with_words(results.environment)),
        "subject": _subject(results),
        "arms": _arms(results),
        "cells": _cells(results),
        "left_out": max(0, len(results.cells) - _MOST_CELLS),
        "experiment": _json(msgspec.to_builtins(experiment)),
        "command": clean(results.command or ""),
        "version": clean(results.tensorkeep or "unknown"),
        "seed": experiment.seed,
        "training": experiment.workload == "training",
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) if value else ""


def _facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is known of the machine as (name, value), nested names joined by blanks."""
    facts = []
    for key, value in environment.items():
        label = clean(str(key)).replace("_", " ")
        if isinstance(value, dict):
            facts += [(f"{label}: {name}", text) for name, text in _facts(value)]
        elif isinstance(value, list):
            facts.append((label, clean(json.dumps(value, ensure_ascii=False)) if value else "none"))
        elif label.endswith(" bytes") and isinstance(value, int | float | None):
            facts.append((label.removesuffix(" bytes"), "none" if value is None else format_bytes(value)))
        else:
            facts.append((label, _plain(value)))
    return facts


def _with_words(environment: dict[str, Any]) -> dict[str, Any]:
    """Say of a package without a version that it is not installed."""
    versions = environment.get("versions")
    if not isinstance(versions, dict):
        return environment
    return {**environment, "versions": {name: version or "not installed" for name, version in versions.items()}}


def _plain(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return clean(str(value))


def _subject(results: Results) -> list[tuple[str, str]]:
    subject = results.subject
    if subject == Subject():
        return []
    facts = [("state", clean(subject.description))]
    if subject.tensors is not None:
        facts.append(("tensors", f"{subject.tensors:,}"))
    if subject.bytes is not None:
        binary = f" ({subject.bytes / GIB:.2f} GiB)" if subject.bytes >= GIB / 100 else ""
        facts.append(("raw bytes", f"{format_bytes(subject.bytes)}{binary}"))
    facts += [(clean(name), format_bytes(count)) for name, count in (subject.dtypes or {}).items()]
    return facts


def _arms(results: Results) -> Sheet:
    rows: list[tuple[Entry, ...]] = []
    for arm in results.arms:
        settings = Entry(clean(json.dumps(arm.settings, ensure_ascii=False)), code=True)
        rows.append((entry(clean(arm.name)), entry(arm.role), entry(clean(arm.about)), settings))
    return Sheet("Arms", ("=arm", "=role", "about", "settings"), rows)


def _cells(results: Results) -> Sheet:
    """Return every cell with its raw samples and the command that runs it again."""
    measures = [f">{one.label} ({one.unit})" for one in results.measures]
    rows: list[tuple[Entry, ...]] = []
    for cell in sorted(results.cells, key=lambda cell: cell.order)[:_MOST_CELLS]:
        figures = [cell.figures.get(measure.name) for measure in results.measures]
        shown = [entry("-") if value is None else entry(_raw(value), value) for value in figures]
        seconds = entry("-") if cell.seconds is None else entry(number(cell.seconds), cell.seconds)
        rows.append(
            (
                entry(clean(cell.arm)),
                entry(str(cell.block + 1), cell.block),
                entry(str(cell.order + 1), cell.order),
                entry(STATUS[cell.status], tone="" if cell.status == "ok" else "bad"),
                *shown,
                seconds,
                Entry(clean(shlex.join(cell.command)), code=True),
            )
        )
    headings = ("=arm", ">block", ">order", "=status", *measures, ">process (s)", "=command")
    return Sheet("Every cell", headings, rows, "Raw samples in the order in which they were taken.")


def _raw(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 1000 else number(value)
