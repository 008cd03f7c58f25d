"""Write ``docs/reference/techniques.md`` from the registry and the results: ``python benchmarks/techniques_page.py``.

What a technique is comes from its class, what it did from each ``benchmarks/results/techniques*.json.gz``, and what
several did together from the results of the experiments in `_COMBINED`. ``tensorkeep bench training`` wrote them; a
test checks that the page is up to date.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from chatgot.techniques.base import TECHNIQUE_CLASSES, Technique
from chatgot.techniques.stack import COMBINATIONS
from page import RESULTS, markdown
from tensorkeep.units import counted, format_bytes
from tensorkeep_bench.analysis.samples import PRACTICAL
from tensorkeep_bench.report.tables import why_not_run
from tensorkeep_bench.results import Arm, ArmStatistics, Results, Settings, read_results
from tensorkeep_bench.wording import NOTHING, difference, gain, interval

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "techniques.md"

_PREFIX = "techniques."
_LOSSES = {"loss": "loss at equal tokens", "loss_in_time": "loss in equal time"}

_COMBINED = ("combinations", "best-stack", "training-claims")
"""Experiments that combine techniques; their results are named after them."""

_MANY_ARMS = 20
"""With fewer arms, results are of chosen techniques."""

# The experiments of ChatGoT's roadmap: the number in its tracking table, the number in its tables of implemented and
# planned optimisations, its name and difficulty there, and the arms of the experiment `techniques`.
_ROADMAP = (
    ("01", "05", "PyTorch 2.0+ Compilation", "easy", "compile"),
    ("02", "06", "Flash Attention 2", "medium", "attention-flash"),
    ("03", "03", "Gradient Accumulation", "easy", "gradient-accumulation"),
    ("04", "", "CUDA Graphs", "hard", "cuda-graphs"),
    ("05", "02", "Activation (Gradient) Checkpointing", "medium", "activation-checkpointing"),
    ("06", "07", "8-bit Optimizers", "easy", "low-bit-8"),
    ("07", "08", "Activation Function Experiments", "medium", "swiglu geglu relu2"),
    ("08", "", "CPU Affinity Optimization", "easy", "cpu-threads"),
    ("09", "01", "Mixed Precision Training", "easy", "mixed-precision"),
    ("10", "", "Auto-tune scheduler", "medium", "lr-plateau lr-range-test"),
    ("11", "", "Fused Kernel Operations", "hard", "fused-cross-entropy fused-optimizer triton-kernel"),
    ("12", "10", "Tensor (Model) Parallelism", "hard", "tensor-parallel pipeline-parallel fsdp"),
    ("", "04", "Memory Optimization Settings", "", "tf32 allocator"),
    ("", "09", "CPU Offloading", "medium", "optimizer-offload"),
    ("", "", "Progressive Growing Sequence Length", "", "progressive-length"),
    ("", "", "Dynamic Sparse Attention", "", "sparse-attention"),
    ("", "", "Curriculum-based Training", "", "length-curriculum loss-curriculum"),
    ("", "", "Quantized Forwarding", "", "quantised-forward"),
    ("", "", "Optimal Buffer Swapping", "", "activation-swapping"),
)
_GPU = "training-gpu.json"

_HEAD = """# Techniques

Each technique is a switch of `tensorkeep train` (`--technique NAME`, or a setting: `--techniques.NAME.SETTING VALUE`).
The first step verifies that the technique is active; otherwise the run ends with an error. A *systems* technique
changes the losses by no more than its stated tolerance; an *algorithmic* technique may change them.
`tensorkeep train --list-techniques` shows the techniques that your machine can run, and
[`tensorkeep bench training`](../how-to/bench-training.md) measures them.
`python packages/tensorkeep-bench/benchmarks/techniques_page.py` makes this page from the classes and from `results/`.

Speed and loss are gains over the plain loop, with their 95% intervals: above 1 is better, so a loss of 1.01x is lower.
*No difference within N%*: the runs exclude a larger difference. *Undecided within N%*: the difference may exceed 5%.
*A little*: a difference is shown, and its best estimate is below 5%. An interval covers one arm; a verdict also allows
for the number of arms (Holm's correction). Memory counts the tensors of a step, measured and predicted from shapes,
with the factor to the plain loop: below 1 is less. Losses appear only for techniques that may change them.
"""


def page() -> str:
    """Return the page."""
    measured = [read_results(path) for path in sorted(RESULTS.glob("techniques*.json.gz"))]
    together = [read_results(path) for name in _COMBINED for path in sorted(RESULTS.glob(f"{name}*.json.gz"))]
    techniques: list[type[Technique]] = [TECHNIQUE_CLASSES.get(name) for name in TECHNIQUE_CLASSES.names()]
    combined = "".join(
        f"* `{name}`: {', '.join(f'`{each}`' for each in parts)}\n" for name, parts in COMBINATIONS.items()
    )
    parts = [_HEAD, _overview(techniques), *(measured_table(results) for results in measured)]
    parts += ["## Named combinations\n", combined, *(combined_table(results) for results in together)]
    parts += [roadmap(measured), *(_section(each, techniques) for each in techniques)]
    return "\n".join(parts)


def _overview(techniques: list[type[Technique]]) -> str:
    rows = [[f"[{each.name}](#{each.name})", each.kind, each.summary, each.effect] for each in techniques]
    return markdown(["technique", "kind", "what it does", "what to expect"], rows)


def measured_table(results: Results) -> str:
    """Return what the arms with one technique did: speed, memory beside its prediction, and loss."""
    chosen = len(results.arms) < _MANY_ARMS
    claim = ": what claims speed there, more often" if chosen else ""
    about = f"## Measured on {_machine(results)}{claim}\n\n{_runs(results)}\n\n"
    arms = [arm for arm in results.arms if arm.role == "arm" and len(_techniques(arm)) == 1]
    headings = ["technique", "speed", "verdict", "memory", "predicted", *_LOSSES.values()]
    return about + markdown(headings, [_row(results, arm, _label(arm)) for arm in sorted(arms, key=_label)])


def combined_table(results: Results) -> str:
    """Return what the arms of an experiment did that combines techniques: speed, and memory beside its prediction."""
    about = f"### {results.experiment.title}\n\nOn {_machine(results)}. {_runs(results)}\n\n"
    arms = [arm for arm in results.arms if arm.role == "arm"]
    headings = ["techniques", "speed", "verdict", "memory", "predicted"]
    rows = [_row(results, arm, f"{arm.name}: {_parts(arm)}")[: len(headings)] for arm in arms]
    return about + markdown(headings, rows)


def roadmap(measured: list[Results]) -> str:
    """Return the table of the roadmap's experiments, with the effect of each technique that was measured here."""
    gpu = json.loads((RESULTS / _GPU).read_text())
    device = gpu["environment"]["devices"][0]["name"]
    about = (
        "The experiments of ChatGoT's optimization roadmap: *tracked* is the number in its tracking table, *listed*\n"
        "the number in its tables of implemented and planned optimizations; its additional ideas have no number. All\n"
        "are implemented here. Speed, memory and loss are against the plain loop, on 2 cores as in the tables above.\n"
        f"On one {device} each speed comes from a single turn of half a second, without an interval\n"
        "([how](../how-to/techniques.md#measured-on-a-gpu)).\n\n"
    )
    rows = [
        [tracked or NOTHING, listed or NOTHING, name, difficulty or NOTHING, *_effect(f"only {arm}", measured, gpu)]
        for tracked, listed, name, difficulty, arms in _ROADMAP
        for arm in arms.split()
    ]
    headings = ["tracked", "listed", "experiment", "difficulty there", "technique", "speed", "verdict", "memory"]
    return f"## The experiments 01 to 12 of a training roadmap\n\n{about}" + markdown(
        [*headings, "loss at equal tokens", f"speed on {device}"], rows
    )


def _effect(arm: str, measured: list[Results], gpu: dict[str, Any]) -> list[str]:
    """Return an arm's technique, speed, verdict, memory and loss on the CPU, and its technique's speed on the GPU."""
    # The last results that have it: results of chosen techniques have more runs.
    results, found = next((each, one) for each in reversed(measured) for one in each.arms if one.name == arm)
    label, speed, verdict_, memory, _, loss, _ = _row(results, found, _label(found))
    speeds = {name: one["tokens_per_second"] for name, one in gpu["arms"].items() if one.get("tokens_per_second")}
    own = next((name for name in speeds if _names(gpu["settings"][name]) == _techniques(found)), None)
    on_gpu = gain(statistics.median(speeds[own]) / statistics.median(speeds["plain"])) if own else NOTHING
    return [label, speed, verdict_, memory, loss, on_gpu]


def _runs(results: Results) -> str:
    blocks = [sum(cell.status == "ok" for cell in cells) for cells in results.cells_by_arm.values()]
    blocks = [count for count in blocks if count]
    runs = f"{counted(min(blocks), 'block')} or more per arm" if blocks else "no blocks"
    about = f"Runs of {results.subject.description}; {runs}; {results.started[:10]}."
    noise = results.summary.noise.get("tokens_per_second")
    return about + (f" The plain loop against itself: {interval(noise.low, noise.high)}." if noise else "")


def _parts(arm: Arm) -> str:
    return ", ".join(f"`{each}`" for each in sorted(_techniques(arm)))


def _machine(results: Results) -> str:
    environment: dict[str, Any] = results.environment or {}
    devices = environment.get("devices") or []
    processor = environment.get("processor") or {}
    name = devices[0].get("name") if devices and isinstance(devices[0], dict) else None
    return str(name or f"{processor.get('usable_cores', '?')} cores of {processor.get('model', 'a processor')}")


def _techniques(arm: Arm) -> set[str]:
    return _names(arm.settings)


def _names(settings: Settings) -> set[str]:
    return {key.removeprefix(_PREFIX).split(".")[0] for key in settings if key.startswith(_PREFIX)}


def _label(arm: Arm) -> str:
    """Return an arm's technique, with the settings that it has, and the number of ranks."""
    (technique,) = _techniques(arm)
    parts = [f"{key.split('.')[-1]} {value}" for key, value in arm.settings.items() if key.count(".") > 1]
    parts += [f"{arm.settings['ranks']} ranks"] if "ranks" in arm.settings else []
    return f"[{technique}](#{technique})" + (f": {', '.join(parts)}" if parts else "")


def _row(results: Results, arm: Arm, label: str) -> list[str]:
    cells = results.cells_by_arm[arm.name]
    if not any(cell.status == "ok" for cell in cells) or any(cell.status == "gate" for cell in cells):
        status, reason = why_not_run([cell for cell in cells if cell.status != "ok"])
        word = "not run here" if status == "not run" else status
        return [label, NOTHING, f"{word}: {reason}", NOTHING, NOTHING, *(NOTHING for _ in _LOSSES)]
    speed = results.statistics(arm.name, "tokens_per_second")
    changes_loss = any(TECHNIQUE_CLASSES.get(each).kind == "algorithmic" for each in _techniques(arm))
    losses = [_figure(results.statistics(arm.name, name)) if changes_loss else NOTHING for name in _LOSSES]
    memory = [_bytes(results, arm, name) for name in ("peak_memory", "predicted_memory")]
    return [label, _figure(speed), verdict(speed), *memory, *losses]


def verdict(speed: ArmStatistics) -> str:
    """Return a verdict on speed in words: (a little) faster or slower, no difference within so much, or undecided."""
    words = {"helps": "faster", "hurts": "slower"}
    if speed.verdict in words or speed.gain_low is None or speed.gain_high is None:
        return words.get(speed.verdict or "", speed.verdict or NOTHING)
    largest = max(speed.gain_high, 1 / speed.gain_low)
    if speed.verdict != "about the same":
        return f"undecided within {difference(largest)}"
    if largest > PRACTICAL:
        return "a little faster" if speed.gain_low > 1 else "a little slower"
    return f"no difference within {difference(largest)}"


def _bytes(results: Results, arm: Arm, measure: str) -> str:
    found = results.statistics(arm.name, measure)
    if found.median is None:
        return NOTHING
    return format_bytes(round(found.median)) + (f" ({gain(1 / found.gain)})" if found.gain else "")


def _figure(found: ArmStatistics) -> str:
    return NOTHING if found.gain is None else f"{gain(found.gain)} ({interval(found.gain_low, found.gain_high)})"


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
        names: dict[str, list[str]] = {}
        for name, reason in sorted(conflicts.items()):
            names.setdefault(reason, []).append(f"`{name}`")
        yield "Conflicts with " + "; ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items()) + "."


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    PAGE.write_text(page())
