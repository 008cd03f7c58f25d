"""Write ``docs/measured.md`` from the results that are committed: ``python benchmarks/page.py``.

Every figure on the page comes from a file in ``benchmarks/results/``; a test checks that the page is up to date.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.pages.elements import ReportTable
from tensorkeep_bench.analysis.summary import summarise
from tensorkeep_bench.report.sentences import headlines, noise_lines
from tensorkeep_bench.report.tables import claims_table, design_tables, verdict_table
from tensorkeep_bench.results import Arm, Measure, Results, read_results

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[3] / "docs" / "measured.md"

SECTIONS = {
    "peers-bfloat16": "Tools, bfloat16",
    "peers-float16": "Tools, float16",
    "full": "The whole model",
    "from-baseline-to-tensorkeep": "From T5X's TensorStore to Tensorkeep, one change at a time",
    "six-way-float16": "Six ways, float16",
    "six-way-bfloat16": "Six ways, bfloat16",
    "isolated-float16": "Each optimisation isolated, float16",
    "isolated-bfloat16": "Each optimisation isolated, bfloat16",
    "claims": "Published claims",
    "a-a-control": "The noise of the machine",
}

_HEAD = """# What was measured

All figures come from one machine with 2 virtual cores on a shared host; each result file describes the machine in full.
`tensorkeep bench checkpoint` and [`measure.sh`](../packages/tensorkeep-bench/benchmarks/measure.sh) measure the same on
your machine. `python packages/tensorkeep-bench/benchmarks/page.py` makes this page from the files in `results/`.

Every arm runs in its own process, in randomised blocks, and every load is compared with the saved state, bit for bit.
*Durable* means that the files are on the disk when the clock stops, for every tool; *cold* was verified with `mincore`.
A gain is the factor between arm and baseline, above 1 if the arm is better, with its 95% interval; rates are medians in
bytes of the state. A verdict of *helps* or *hurts* needs a significant difference (Holm's correction) that is larger
than the difference between the baseline and its repetition (the arm "again"). With few blocks on a noisy machine many
differences are "undecided": their interval may exclude 1, but among so many arms one does so by chance.
"""


def page() -> str:
    """Return the page, made of the results that exist."""
    parts = [_HEAD]
    for name, title in SECTIONS.items():
        if (RESULTS / f"{name}.json.gz").exists():
            parts += [f"## {title}\n", *_section(name)]
    if (RESULTS / "by-hand.json.gz").exists():
        parts += ["## The bench against a stopwatch\n", *_by_hand()]
    return "\n".join(parts)


def _section(name: str) -> Iterator[str]:
    results = read_results(RESULTS / f"{name}.json.gz")
    # By the rules of today: the samples are what was measured.
    results = msgspec.structs.replace(results, summary=summarise(results))
    subject = results.subject.description
    day = results.started[:10]
    samples = f"[samples](../packages/tensorkeep-bench/benchmarks/results/{name}.json.gz)"
    yield f"`{results.command}`: {subject}; {results.blocks} blocks; {day}; {samples}.\n"
    if results.experiment.about:
        yield f"{results.experiment.about}\n"
    claims = claims_table(results)
    if claims is not None:
        yield _table(claims)
    else:
        yield _arms_table(results)
        yield from (f"{table.title}:\n\n{_table(table)}" for table in design_tables(results)["steps"][:2])
        # An arm and its control show the noise, and have no verdict.
        if any(arm.role == "arm" for arm in results.arms):
            yield "".join(f"* {line}\n" for line in headlines(results))
    yield "Noise:\n\n" + "".join(f"* {line}\n" for line in noise_lines(results))


def _arms_table(results: Results) -> str:
    measures = [measure for measure in results.primary() if measure.unit in ("s", "B")]
    headings = ["arm"]
    for measure in measures:
        headings += [f">{measure.label}", ">gain (95%)", "verdict"] if measure.unit == "s" else [f">{measure.label}"]
    rows = [[arm.name, *_figures(results, arm, measures)] for arm in results.arms]
    return markdown(headings, rows) + _smaller_subjects(results)


def _smaller_subjects(results: Results) -> str:
    """Name the arms that worked on another subject than the others."""
    main = results.subject.description
    found: dict[str, list[str]] = {}
    for arm in results.arms:
        for subject in {cell.subject for cell in results.cells_by_arm[arm.name]} - {main, None}:
            found.setdefault(str(subject), []).append(arm.name)
    words = "On a smaller part of the model, because they would take hours"
    return "".join(
        f"\n{words} ({subject}; compared by the byte): {', '.join(names)}.\n" for subject, names in found.items()
    )


def _figures(results: Results, arm: Arm, measures: Sequence[Measure]) -> Iterator[str]:
    for measure in measures:
        table = verdict_table(results, measure)
        row = next(row for row in table.texts() if row[0] == arm.name)
        found = dict(zip((heading.lstrip(">=") for heading in table.headings), row, strict=True))
        if measure.unit == "s":
            gain = found["gain"] if found["gain"] == "-" else f"{found['gain']} ({found['95% interval']})"
            yield from (found["throughput"], gain, found["verdict"])
        else:
            yield found["of raw"]


def _table(table: ReportTable) -> str:
    return markdown(table.headings, table.texts())


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; a heading that begins with ``>`` has its column to the right."""
    marks = ["---:" if heading.startswith(">") else "---" for heading in headings]
    lines = [[heading.lstrip(">=") for heading in headings], marks, *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _by_hand() -> Iterator[str]:
    found: dict[str, Any] = json.loads(gzip.decompress((RESULTS / "by-hand.json.gz").read_bytes()))
    yield (
        f"`{found['command']}`: the same save, timed by the bench (twice) and by a script of a dozen lines that shares "
        "no code with it. The harness adds no measurable time if the second interval contains 1, or lies within the "
        "first.\n"
    )
    rows = []
    for tool, ratios in found["ratios"].items():
        texts = [f"{one['gain']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in ratios.values()]
        rows.append([tool, *texts, str(len(found["samples"][tool]["bench"]))])
    yield markdown(["save", ">bench again / bench (95%)", ">by hand / bench (95%)", ">rounds"], rows)


if __name__ == "__main__":
    PAGE.write_text(page())
