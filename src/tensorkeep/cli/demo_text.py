"""The text of ``tensorkeep demo``, part by part."""

from tensorkeep.bench.analysis.verdicts import SMALLEST_STATE
from tensorkeep.bench.analysis.wording import number
from tensorkeep.bench.demo.damage import DamageReport, PeerDamage
from tensorkeep.bench.demo.killed_save import KilledSave
from tensorkeep.bench.demo.results import DemoResults, facts
from tensorkeep.bench.demo.speed import SmallRun, notes
from tensorkeep.bench.demo.training import ComparedRuns
from tensorkeep.bench.results import Results
from tensorkeep.bench.run.rounds import Rounds
from tensorkeep.cli.charts import print_bars, sparkline
from tensorkeep.cli.output import Output
from tensorkeep.cli.text import columns
from tensorkeep.report.charts.bars import Bars
from tensorkeep.report.demo_bars import six_way_bars, speed_bars
from tensorkeep.units import counted, format_bytes, format_seconds

_WIDTH, _AROUND = 60, 21
"""Characters of a curve, and those beside it."""


def print_speed(output: Output, description: str, nbytes: int, rounds: Rounds, t5x: SmallRun) -> None:
    """Print the bars of saves, first loads and bytes."""
    output.paragraph(
        f"1. Save and load {description}: the median of {counted(rounds.count, 'round')}, in each of "
        "which every tool runs once, in random order. A save ends when the checkpoint is on the disk (fsync, for every "
        "tool). Each load is the first in a new process, of files in the page cache."
    )
    _print_bars(output, speed_bars(rounds, t5x, nbytes))
    sentences = notes(rounds, t5x)
    if nbytes < SMALLEST_STATE:
        small = f"Below {format_bytes(SMALLEST_STATE)}, opening files and caches dominate"
        sentences.append(f"{small}: these times say little about large states.")
    sentences.append(
        "Every load returned every bit. tensorkeep and tensorstore verify checksums while they load, torch and "
        "safetensors do not. safetensors maps the file instead of reading it."
    )
    output.paragraph(*(f"   {sentence}" for sentence in sentences))


def print_damage(output: Output, damage: DamageReport, peers: list[PeerDamage]) -> None:
    """Print what each tool made of a flipped bit."""
    flip = damage.flip
    lines = [
        f"{each.tool} loads {number(each.after or 0.0)} instead of {number(each.before)}, without a word."
        if each.silent
        else f"{each.tool} raises: {each.error}."
        for each in peers
    ]
    named = [f"file {each.file}, tensor {each.name}, block {each.block}" for each in damage.report.problems]
    found = f"tensorkeep verify finds it: {'; '.join(named)}." if named else "tensorkeep verify did NOT notice."
    output.paragraph(
        f"2. One bit is flipped in a checkpoint of each tool, in tensor {flip.name}.",
        *(f"   {line}" for line in lines),
        f"   {found}",
        f"   tensorkeep.load refuses it: {damage.refusal}.",
    )


def print_kills(output: Output, kills: list[KilledSave]) -> None:
    """Print what was left of a checkpoint after a save over it was killed."""
    lines = []
    for kill in kills:
        left = "still loads, with every bit that it had" if kill.intact else f"is broken: {kill.error}"
        lines.append(
            f"   {kill.tool}: killed after {format_seconds(kill.seconds)}, {format_bytes(kill.written)} of "
            f"{format_bytes(kill.nbytes)} written. The old checkpoint {left}."
        )
    output.paragraph("3. kill -9 in the middle of a save that replaces the checkpoint.", *lines)


def print_training(output: Output, runs: ComparedRuns) -> None:
    """Print both loss curves over each other."""
    output.paragraph(f"4. {runs.text()}")
    both = [*runs.unbroken, *runs.resumed]
    ends, width = (min(both), max(both)), max(1, min(_WIDTH, columns() - _AROUND))
    output.print_lines(
        "",
        f"   no kill   {sparkline(runs.unbroken, width, *ends)}  {runs.unbroken[-1]:.4f}",
        f"   killed    {sparkline(runs.resumed, width, *ends)}  {runs.resumed[-1]:.4f}",
    )


def print_six_ways(output: Output, results: Results) -> None:
    """Print the six-way comparison."""
    output.paragraph(
        "5. Six ways to checkpoint, and Tensorkeep: torch.save, TensorStore (ts) as its examples use it, the settings "
        "of T5X, and TensorStore with one of these settings at a time (ts+...). Each ran once with a small state; the "
        "figures are scaled to 1 GB, and one run gives only an impression."
    )
    _print_bars(output, six_way_bars(results)[:1])


def _print_bars(output: Output, groups: list[Bars]) -> None:
    for bars in groups if output.shows_text else ():
        output.print_lines("")
        print_bars(bars)


def print_facts(output: Output, results: DemoResults, page: str) -> None:
    """Print the closing lines and the path of the page."""
    output.paragraph("In short, on this machine, just now:", *(f" - {line}" for line in facts(results)))
    output.print_lines("", f"All of it, with plots and tables: {page}")
