"""Write ``docs/reference/techniques.md`` from the registry and the results: ``python benchmarks/techniques_page.py``.

What a technique is comes from its class, what it did from each ``benchmarks/results/techniques*.json``, which
``tensorkeep bench training`` wrote; a test checks that the page is up to date.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.bench.analysis.wording import gain, interval
from tensorkeep.bench.results import Arm, Results, Statistics
from tensorkeep.bench.results_file import read_results
from tensorkeep.report.tables import why_not_run
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Technique
from tensorkeep.train.techniques.stack import COMBINATIONS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "techniques.md"

_PREFIX = "techniques."
_MEASURES = {
    "tokens_per_second": "speed",
    "peak_memory": "memory",
    "loss": "loss",
    "loss_in_time": "loss in equal time",
}
_UNSETTLED = ("within noise", "too few runs")

_HEAD = """# Techniques

Each technique is a switch of `tensorkeep train` (`--technique NAME`, or a setting: `--techniques.NAME.SETTING VALUE`).
The first step verifies that the technique is active; otherwise the run ends with an error. A *systems* technique
changes the losses by no more than its stated tolerance; an *algorithmic* one may change them.
`tensorkeep train --list-techniques` shows which of them can run on your machine, and
[`tensorkeep bench training`](../how-to/bench-training.md) measures them there. This page is made from the classes and
from [`benchmarks/results/`](../../benchmarks/results) by `python benchmarks/techniques_page.py`.

Each figure is a ratio to the plain loop with its 95% interval; above 1 is better: more tokens per second, less memory,
a lower loss. Differences within the noise of the machine are marked.
"""


def page() -> str:
    """Return the page."""
    measured = [read_results(path) for path in sorted(RESULTS.glob("techniques*.json"))]
    techniques: list[type[Technique]] = [TECHNIQUE_CLASSES.get(name) for name in TECHNIQUE_CLASSES.names()]
    parts = [_HEAD, *map(_about_results, measured), _overview(techniques, measured)]
    combined = "".join(
        f"* `{name}`: {', '.join(f'`{each}`' for each in parts)}\n" for name, parts in COMBINATIONS.items()
    )
    parts += ["## Named combinations\n", combined, *(_section(each, techniques) for each in techniques)]
    return "\n".join(parts)


def _about_results(results: Results) -> str:
    subject = results.subject.description if results.subject else ""
    blocks = len({cell.block for cell in results.cells if cell.status == "ok"})
    return f"Measured on {_machine(results)}: {subject}; {blocks} blocks; {results.started[:10]}.\n"


def _machine(results: Results) -> str:
    environment: dict[str, Any] = results.environment or {}
    devices = environment.get("devices") or []
    processor = environment.get("processor") or {}
    name = devices[0].get("name") if devices and isinstance(devices[0], dict) else None
    return str(name or f"{processor.get('usable_cores', '?')} cores of {processor.get('model', 'a processor')}")


def _overview(techniques: list[type[Technique]], measured: list[Results]) -> str:
    headings = ["technique", "kind", "what it does", "what to expect", *map(_machine, measured)]
    rows = [headings, ["---"] * len(headings)]
    for each in techniques:
        own = f"[{each.name}](#{each.name})"
        found = [_effects(results, each.name) for results in measured]
        rows.append([own, each.kind, each.summary, each.effect, *found])
    return "".join("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |\n" for row in rows)


def _effects(results: Results, name: str) -> str:
    """Return the measured effects of the arms that have only this technique."""
    texts = [_effect(results, arm) for arm in results.arms if arm.role == "arm" and _techniques(arm) == {name}]
    return "<br>".join(texts) or "not measured"


def _techniques(arm: Arm) -> set[str]:
    return {key.removeprefix(_PREFIX).split(".")[0] for key in arm.settings if key.startswith(_PREFIX)}


def _effect(results: Results, arm: Arm) -> str:
    label = _label(arm)
    cells = results.cells_by_arm[arm.name]
    if not any(cell.status == "ok" for cell in cells) or any(cell.status == "gate" for cell in cells):
        status, reason = why_not_run([cell for cell in cells if cell.status != "ok"])
        word = "not run here" if status == "not run" else status
        return f"{label}{word}: {reason}"
    found = {words: results.statistics(arm.name, measure) for measure, words in _MEASURES.items()}
    texts = [f"{words} {_figure(one)}" for words, one in found.items() if one is not None and one.gain is not None]
    return f"{label}{', '.join(texts)}"


def _label(arm: Arm) -> str:
    """Return the settings of the technique that an arm has, for those that have several arms."""
    settings = [f"{key.split('.')[-1]} {value}" for key, value in arm.settings.items() if key.count(".") > 1]
    return f"{', '.join(settings)}: " if settings else ""


def _figure(found: Statistics) -> str:
    if found.verdict in _UNSETTLED:
        return f"{found.verdict} ({gain(found.gain)}, {interval(found.gain_low, found.gain_high)})"
    return f"{gain(found.gain)} ({interval(found.gain_low, found.gain_high)})"


def _section(technique: type[Technique], others: list[type[Technique]]) -> str:
    return "\n".join([f"## {technique.name}\n", *(f"{line}\n" for line in _lines(technique, others))])


def _lines(technique: type[Technique], others: list[type[Technique]]) -> Iterator[str]:
    yield f"It {technique.summary}. Expected effect: {technique.effect}."
    if technique.kind == "systems":
        losses = f"change by at most {technique.tolerance:.2%}" if technique.tolerance else "are bit-identical"
        yield f"*Systems*: losses {losses}. Follows {technique.reference}."
    else:
        yield f"*Algorithmic*: losses may change. Follows {technique.reference}."
    settings = msgspec.to_builtins(technique.Settings())
    if settings:
        yield "Settings: " + ", ".join(f"`{name} = {_shown(value)}`" for name, value in settings.items()) + "."
    conflicts = dict(technique.conflicts)
    for other in others:
        if technique.name in other.conflicts:
            conflicts.setdefault(other.name, other.conflicts[technique.name])
    conflicts.pop(technique.name, None)
    if conflicts:
        yield ("Conflicts with " + "; ".join(f"`{name}`: {reason}" for name, reason in sorted(conflicts.items())) + ".")


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    PAGE.write_text(page())
