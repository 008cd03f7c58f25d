"""The report as one offline page of HTML: which tables it has; fills the templates of ``report/page``."""

import json
import re
import shlex
from html import escape
from typing import Any

import msgspec

from tensorkeep.bench.analysis.wording import capitalised, number
from tensorkeep.bench.results import Results, Subject
from tensorkeep.report.charts.bars import BAR_LEGEND, amount_bars, bars_note
from tensorkeep.report.charts.gains import gain_map
from tensorkeep.report.charts.losses import loss_charts, losses_note
from tensorkeep.report.charts.scales import GAIN_LEGEND
from tensorkeep.report.comparison import isolated_table
from tensorkeep.report.design_tables import aliases_lines, claims_table, design_tables
from tensorkeep.report.headlines import completeness, headlines, measured_by, noise_lines, purpose
from tensorkeep.report.measures import GIB
from tensorkeep.report.plots import FILES_ONLY
from tensorkeep.report.plots.drawing import PALETTE, Plot
from tensorkeep.report.rendering import render_page
from tensorkeep.report.subject import subject_and_machine
from tensorkeep.report.tables import STATUS, Entry, ReportTable, not_run_table, observed_table, verdict_table
from tensorkeep.report.verdict import verdict_sentence
from tensorkeep.units import format_bytes

_MOST_CELLS = 3000


def report_page(results: Results, plots: list[Plot]) -> str:
    """Return the page with the plots that `tensorkeep.report.plots.draw_plots` returned.

    Raises MissingExtraError if jinja2 is not installed.
    """
    names = {plot.name for plot in plots}
    # A design has a plot of its own. Bars begin at 0, where no loss is, so that training has a map of gains.
    picture = next((name for name in ("steps", "effects") if name in names), "")
    return render_page(
        "template.html.j2",
        plots={plot.name: (plot.title, themed(plot)) for plot in plots if plot.name not in FILES_ONLY},
        picture=picture or ("gains" if results.experiment.workload == "training" else "bars"),
        **_content(results),
    )


def themed(plot: Plot) -> str:
    """Return a figure's SVG for the page: as wide as its box, with colours that the page's style sheet defines."""
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    # Group ids repeat from figure to figure, and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    for name, colour in PALETTE.items():
        body = body.replace(colour, f"var(--plot-{name})")
    return f'{head} role="img" aria-label="{escape(plot.title)}">{body}'


def _content(results: Results) -> dict[str, Any]:
    summary, experiment = results.summary, results.experiment
    not_run, observed = not_run_table(results), observed_table(results)
    heading, subject = experiment.title or experiment.name, subject_and_machine(results)
    return {
        "title": f"{heading}: {subject}",
        "heading": heading,
        "measured": subject,
        "verdict": verdict_sentence(results),
        "bars": amount_bars(results),
        "bars_note": bars_note(results),
        "bar_legend": BAR_LEGEND,
        "gains": gain_map(results),
        "gain_legend": GAIN_LEGEND,
        "losses": loss_charts(results),
        "losses_note": losses_note(results),
        "about": experiment.about,
        "measured_by": measured_by(results),
        "incomplete": completeness(results),
        "headlines": headlines(results),
        "recommendations": [
            (purpose(one), capitalised(one.text), _json(one.settings)) for one in summary.recommendations
        ],
        "warnings": summary.warnings,
        "noise": noise_lines(results),
        "comparison": isolated_table(results),
        "verdicts": [verdict_table(results, measure) for measure in results.primary()],
        **design_tables(results),
        "aliases": aliases_lines(results),
        "claims": claims_table(results),
        "not_run": not_run if not_run.rows else None,
        "observed": observed if observed.rows else None,
        "environment": facts_of(results.environment),
        "subject": _subject(results.subject),
        "arms": arms_table(results),
        "cells": _cells(results),
        "left_out": max(0, len(results.cells) - _MOST_CELLS),
        "experiment": _json(msgspec.to_builtins(experiment)),
        "command": results.command,
        "version": results.tensorkeep or "unknown",
        "seed": experiment.seed,
        "training": experiment.workload == "training",
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) if value else ""


def facts_of(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the environment as (name, value); nested names are joined by blanks."""
    facts = []
    for key, value in environment.items():
        label = key.replace("_", " ")
        if isinstance(value, dict):
            if key == "versions":
                value = {name: version or "not installed" for name, version in value.items()}
            facts += [(f"{label}: {name}", text) for name, text in facts_of(value)]
        elif value is None or value == []:
            facts.append((label.removesuffix(" bytes"), "none"))
        elif isinstance(value, list):
            facts.append((label, json.dumps(value, ensure_ascii=False)))
        elif isinstance(value, bool):
            facts.append((label, "yes" if value else "no"))
        elif label.endswith(" bytes") and isinstance(value, int | float):
            facts.append((label.removesuffix(" bytes"), format_bytes(value)))
        else:
            facts.append((label, str(value)))
    return facts


def _subject(subject: Subject) -> list[tuple[str, str]]:
    if subject == Subject():
        return []
    facts = [("state", subject.description)]
    if subject.tensors is not None:
        facts.append(("tensors", f"{subject.tensors:,}"))
    if subject.bytes is not None:
        binary = f" ({subject.bytes / GIB:.2f} GiB)" if subject.bytes >= GIB / 100 else ""
        facts.append(("raw bytes", f"{format_bytes(subject.bytes)}{binary}"))
    return facts + [(name, format_bytes(count)) for name, count in subject.dtypes.items()]


def arms_table(results: Results) -> ReportTable:
    """Return the arms and their settings."""
    rows = []
    for arm in results.arms:
        settings = Entry(json.dumps(arm.settings, ensure_ascii=False), code=True)
        rows.append((Entry(arm.name), Entry(arm.role), Entry(arm.about), settings))
    return ReportTable("Arms", ("=arm", "=role", "about", "settings"), rows)


def _cells(results: Results) -> ReportTable:
    """Return every cell with its raw samples and the command that runs it again."""
    rows: list[tuple[Entry, ...]] = []
    for cell in sorted(results.cells, key=lambda cell: cell.order)[:_MOST_CELLS]:
        figures = [_raw(cell.figures.get(measure.name)) for measure in results.measures]
        rows.append(
            (
                Entry(cell.arm),
                Entry(str(cell.block + 1), cell.block),
                Entry(str(cell.order + 1), cell.order),
                Entry(STATUS[cell.status], tone="" if cell.status == "ok" else "bad"),
                *figures,
                _raw(cell.seconds),
                Entry(shlex.join(cell.command), code=True),
            )
        )
    measures = [f">{one.label} ({one.unit})" for one in results.measures]
    headings = ("=arm", ">block", ">order", "=status", *measures, ">process (s)", "=command")
    return ReportTable("Every cell", headings, rows, "Raw samples in the order in which they were taken.")


def _raw(value: float | None) -> Entry:
    if value is None:
        return Entry("-")
    return Entry(f"{value:,.0f}" if value == round(value) and abs(value) >= 1000 else number(value, 4), value)
