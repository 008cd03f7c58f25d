"""The results of ``tensorkeep demo`` as JSON, sentences, bars, and a page (``report/page/demo.html.j2``)."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep import VerifyReport, __version__
from tensorkeep.ext import counted, format_bytes, format_seconds, number
from tensorkeep.ext.pages import (
    Bars,
    Chart,
    ChartBar,
    Curve,
    ReportTable,
    TableEntry,
    chart,
    check_page,
    facts_of,
    render_page,
)
from tensorkeep.ext.storage import replace_file
from tensorkeep_bench.checkpoint.measure import FIRST, SAVE, STORED, WARM
from tensorkeep_bench.demo.faults import DamageReport, KilledSave, PeerDamage
from tensorkeep_bench.demo.speed import TOOLS, SmallRun, figures, notes
from tensorkeep_bench.demo.training import ComparedRuns
from tensorkeep_bench.report.html import REPORT, arms_table
from tensorkeep_bench.report.tables import improvements_table, isolated_table
from tensorkeep_bench.results import Results
from tensorkeep_bench.wording import listed


@dataclass(frozen=True, slots=True)
class DemoResults:
    source: str | None
    description: str
    tensors: int
    state_bytes: int
    rounds: Results
    t5x: SmallRun
    intact: VerifyReport
    damage: DamageReport
    peers: list[PeerDamage]
    kills: list[KilledSave]
    training: ComparedRuns
    six_way: Results

    @property
    def ok(self) -> bool:
        # Only the saves of Tensorkeep: a checkpoint that torch broke does not fail the demo.
        kept = all(kill.intact for kill in self.kills if kill.tool == "tensorkeep")
        return self.intact.ok and not self.damage.report.ok and kept and self.training.exact

    def document(self) -> dict[str, Any]:
        damage = self.damage
        return {
            "ok": self.ok,
            "source": self.source,
            "tensors": self.tensors,
            "state_bytes": self.state_bytes,
            "measures": msgspec.to_builtins(figures(self.rounds)),
            "rounds": {"seed": self.rounds.experiment.seed, "cells": msgspec.to_builtins(self.rounds.cells)},
            "t5x": asdict(self.t5x),
            "verify": self.intact.as_dict(),
            "damage": {
                "flip": asdict(damage.flip),
                "verify": damage.report.as_dict(),
                "refusal": damage.refusal,
                "peers": [{**asdict(each), "silent": each.silent} for each in self.peers],
            },
            "kills": [{**asdict(each), "intact": each.intact} for each in self.kills],
            "training": {**asdict(self.training), "same": self.training.same, "exact": self.training.exact},
            "six_way": msgspec.to_builtins(self.six_way),
        }


def facts(results: DemoResults) -> list[str]:
    """Return what was measured, in five sentences."""
    table = figures(results.rounds)
    size = format_bytes(results.state_bytes)
    save, load, stored = (
        {arm: figure.median for arm, figure in table.get(measure, {}).items()} for measure in (SAVE, FIRST, STORED)
    )
    fraction = stored["tensorkeep-lossless"] / results.state_bytes
    flip, training = results.damage.flip, results.training
    silent = [
        f"{each.tool} loaded {number(each.after or 0.0)} for {number(each.before)}"
        for each in results.peers
        if each.silent
    ]
    # Another version of a tool may detect the damage.
    unnoticed = f"{listed(silent)}, without a word; " if silent else ""
    left = {kill.tool: "whole, bit for bit" if kill.intact else "broken" for kill in results.kills}
    return [
        f"A durable save of {size}: {_times(save)}; lossless, in {fraction:.0%} of the bytes.",
        f"The first load in a new process: {_times(load)}. Only tensorkeep verifies what it reads.",
        f"One flipped bit: {unnoticed}tensorkeep named tensor {flip.name}, block {flip.block}, and refused to load it.",
        f"kill -9 during a save: the checkpoint of tensorkeep was {left['tensorkeep']}, and the "
        f"checkpoint of torch.save was {left['torch']}.",
        f"kill -9 during training: {training.same} of {len(training.unbroken)} losses are the same, bit for bit, as "
        "without the kill.",
    ]


def _times(seconds: dict[str, float]) -> str:
    arms = [arm for arm in ("tensorkeep", "tensorkeep-lossless", "torch", "safetensors") if arm in seconds]
    return ", ".join(f"{arm.removeprefix('tensorkeep-')} {format_seconds(seconds[arm])}" for arm in arms)


def write_demo_page(results: DemoResults, page: Path) -> None:
    """Write the page; UsageError if the name is not ``*.html``, DestinationExistsError for another file."""
    # Only an earlier report is replaced.
    check_page(page, REPORT)
    replace_file(page, demo_page(results).encode())


def demo_page(results: DemoResults) -> str:
    six_way = results.six_way
    return render_page(
        "demo.html.j2",
        REPORT,
        title="Tensorkeep on this machine",
        description=results.description,
        lines=facts(results),
        rounds=counted(results.rounds.blocks, "round"),
        speed=speed_bars(results.rounds, results.t5x, results.state_bytes),
        notes=notes(results.rounds, results.t5x),
        samples=_samples(results),
        flip=results.damage.flip,
        damage=[*(each.text() for each in results.peers), *results.damage.texts()],
        kills=[each.text() for each in results.kills],
        training=results.training.text(),
        curves=_curves(results),
        six_about=six_way.experiment.about,
        six=six_way_bars(six_way),
        six_tables=[isolated_table(six_way), improvements_table(six_way)],
        six_arms=arms_table(six_way),
        environment=facts_of(six_way.environment),
        version=__version__,
    )


def _samples(results: DemoResults) -> ReportTable:
    rows = [
        (
            TableEntry(cell.arm),
            TableEntry(str(cell.block + 1), cell.block),
            *(_seconds(cell.figures.get(measure)) for measure in (SAVE, FIRST)),
            TableEntry(f"{cell.figures.get(STORED) or 0:,.0f}", cell.figures.get(STORED)),
        )
        for cell in results.rounds.cells
        if cell.status == "ok"
    ]
    headings = ("=tool", ">round", ">durable save (s)", ">first load (s)", ">bytes on disk")
    return ReportTable("Every run", headings, rows, "In the order of the runs.")


def _seconds(value: float | None) -> TableEntry:
    return TableEntry("-") if value is None else TableEntry(f"{value:.3f}", value)


def _curves(results: DemoResults) -> list[Chart]:
    runs = results.training
    resumed = f"Loss of the run killed at step {runs.killed_at}, resumed from step {runs.resumed_from}"
    curves = {"Loss of the run without a kill": ("neutral", runs.unbroken), resumed: ("good", runs.resumed)}
    drawn = (
        chart(title, [Curve("loss", colour, [(float(step), loss) for step, loss in enumerate(losses, 1)])])
        for title, (colour, losses) in curves.items()
    )
    return [each for each in drawn if each is not None]


# Bars, for the page and for the terminal

_TITLES = {SAVE: "durable save", FIRST: "first load in a new process", STORED: "bytes on disk"}
_SIX_WAY = {
    SAVE: "durable save, seconds per GB",
    WARM: "load, seconds per GB",
    STORED: "bytes on disk per byte of state",
}


def speed_bars(rounds: Results, t5x: SmallRun, nbytes: int) -> list[Bars]:
    """Return the bars of saves, first loads and bytes; T5X's are scaled to the full state."""
    table = figures(rounds)
    found = []
    for measure, title in _TITLES.items():
        form = format_bytes if measure == STORED else format_seconds
        row = table.get(measure, {})
        bars = [ChartBar(arm, row[arm].median, form(row[arm].median), tone=_tone(arm)) for arm in TOOLS if arm in row]
        # T5X ran on a smaller state, so its bars are estimates, and marked.
        scaled = t5x.scaled(measure, nbytes)
        if scaled is not None:
            bars.append(ChartBar("t5x", scaled, f"{form(scaled)} *", scaled=True))
        found.append(Bars(title, bars))
    return found


def six_way_bars(results: Results) -> list[Bars]:
    return [Bars(title, list(_per_byte(results, measure))) for measure, title in _SIX_WAY.items()]


def _per_byte(results: Results, measure: str) -> Iterable[ChartBar]:
    for arm in results.arms:
        value = results.statistics(arm.name, measure).per_byte
        if value is not None:
            shown = value if measure == STORED else value * 1e9
            text = f"{shown:.2f}" if measure == STORED else format_seconds(shown)
            yield ChartBar(arm.name, shown, text, tone=_tone(arm.name))


def _tone(arm: str) -> str:
    return "good" if arm.startswith("tensorkeep") else ""
