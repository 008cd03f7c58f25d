"""``tensorkeep demo``: a checkpoint saved, loaded, verified and damaged, beside other tools."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tensorkeep.bench.checkpoint.measure import STORED
from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS
from tensorkeep.bench.checkpoint.workload import MEASURES
from tensorkeep.bench.demo import checkpoint as stages
from tensorkeep.bench.demo.checkpoint import DamageReport, Figure, figures
from tensorkeep.bench.run.rounds import Rounds, run_rounds, tool_measurements
from tensorkeep.checkpoint.load.verify import VerifyReport
from tensorkeep.cli.options import AtLeastOne, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.errors import UsageError
from tensorkeep.units import counted, format_bytes, format_seconds

_LABELS = {measure.name: measure.label for measure in MEASURES}

_MEANINGS = {
    # By a word in the names of the measures.
    "save": "until the checkpoint is durable on the disk (fsync)",
    "cold": "read from the disk: none of the files is in the page cache",
    "warm": "the page cache holds the files",
    "into": "into existing tensors, as when a training run is resumed",
}


def demo(
    *,
    scale: float | None = None,
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    rounds: Annotated[int | None, AtLeastOne] = None,
    directory: Annotated[Path, Parameter(name="--dir")] = Path(),
    training: Annotated[bool, Switch] = False,
    out: Path = Path("demo-run"),
    output: Output = DEFAULT,
) -> int:
    """Save, load, verify and damage a checkpoint, beside torch and safetensors.

    torch, safetensors, tensorkeep and tensorkeep-lossless save and load a state in interleaved rounds. Each loaded
    state is compared with the saved one, bit for bit. Then one bit of a checkpoint is flipped, and tensorkeep verify
    must find it. This takes about a minute. With --training, a small GPT is trained, killed and resumed instead; that
    takes about two minutes.

    Parameters
    ----------
    scale
        The size of the state, as a fraction of OpenLLaMA-3B; 0.1, the default, is 0.7 GB.
    source
        Use the state of this checkpoint instead, of any format.
    rounds
        Number of rounds; 3 by default, and fewer on a slow disk.
    directory
        The folder to write in; what is written is removed.
    training
        Train a model, kill it, resume it, compare the steps that were computed twice, and generate text.
    out
        The folder of the run of --training; it must not exist, and is kept.
    """
    if training:
        # Imports the trainer, which the other demo does not need.
        from tensorkeep.cli.training_demo import training_demo

        return 0 if training_demo(out, output)["ok"] else 1
    if source is not None and scale is not None:
        raise UsageError("--from and --scale exclude each other", remedy="give one of them")
    scale = stages.DEFAULT_SCALE if scale is None else scale
    count = rounds or stages.DEFAULT_ROUNDS
    seconds = stages.LONGEST_SECONDS if rounds is None else math.inf
    visits = count * len(COMMON_TOOLS)
    with stages.temporary_folder(directory) as folder:
        with output.status("building the state"):
            states = stages.build_states(folder, source, scale)
        _print_state(output, states, source, scale)
        with output.status("measuring") as status:

            def progress(done: int, arm: str) -> None:
                status(f"measuring {arm} ({done + 1} of at most {visits})")

            arms = tool_measurements(COMMON_TOOLS, states, folder)
            measured = run_rounds(arms, count, seed=stages.SEED, seconds=seconds, progress=progress)
        _print_comparison(output, measured)
        with output.status("verifying"):
            intact = stages.save_and_verify(folder, states)
            damaged = stages.damage_and_verify(folder)
        _print_verified(output, intact, damaged)
    found = intact.ok and not damaged.report.ok
    document = {
        "ok": found,
        "source": None if source is None else str(source),
        "tensors": len(states.flat.leaves),
        "state_bytes": states.nbytes,
        "measures": msgspec.to_builtins(figures(measured)),
        "rounds": msgspec.to_builtins(measured),
        "verify": intact.as_dict(),
        "damage": {"flip": asdict(damaged.flip), "verify": damaged.report.as_dict(), "refusal": damaged.refusal},
    }
    output.show(document, lambda: _print_next(source))
    return 0 if found else 1


def _print_state(output: Output, states: StatePair, source: Path | None, scale: float) -> None:
    what = f"random bfloat16 weights, with the names and shapes of OpenLLaMA-3B scaled by {scale:g}"
    limits = []
    if source is not None:
        what = str(source)
        limits = ["safetensors stores only tensors under flat names, so only these are compared."]
    amount = f"{counted(len(states.flat.leaves), 'tensor')}, {format_bytes(states.nbytes)}"
    output.paragraph(f"1. The state: {amount}: {what}.", *limits)


def _print_comparison(output: Output, rounds: Rounds) -> None:
    output.paragraph(
        "2. Save and load with torch, safetensors, tensorkeep, and tensorkeep with lossless compression: the median of "
        f"{counted(rounds.count, 'round')}, each in random order. 2.00x: twice as fast as torch in the same round. "
        "66%: of the bytes that torch writes to the disk."
    )
    table = figures(rounds)
    names = list(COMMON_TOOLS)
    rows = [
        (_LABELS[measure], *(_cell(name, measure, row.get(name)) for name in names)) for measure, row in table.items()
    ]
    output.print_lines("")
    if output.shows_text:
        Table(("=", *(f">{name}" for name in names)), rows).show()
    notes = [f"not run: {reason}" for reason in rounds.not_run.values()]
    notes += [f"{word}: {meaning}" for word, meaning in _MEANINGS.items() if any(word in measure for measure in table)]
    if not any("cold" in measure for measure in table):
        notes.append("cold: not measured, because this file system keeps its files in memory (try another --dir)")
    checks = "Every load returned every bit. Of the four, only the two of tensorkeep verify checksums when they load."
    output.paragraph(*notes, checks)


def _cell(arm: str, measure: str, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    value = format_bytes(figure.median) if measure == STORED else format_seconds(figure.median)
    if figure.against_torch is None or arm == "torch":
        return value
    ratio = figure.against_torch.median
    return f"{value}  {f'{ratio:.0%}' if measure == STORED else f'{ratio:.2f}x':>6}"


def _print_verified(output: Output, intact: VerifyReport, damaged: DamageReport) -> None:
    verdict = "no damage" if intact.ok else "the checkpoint is corrupt"
    output.paragraph(
        f"3. Verify: `tensorkeep verify` reads all {counted(intact.tensors, 'tensor')} and checks the checksums "
        f"({intact.checked}): {verdict}."
    )
    flip = damaged.flip
    found = [
        f"`tensorkeep verify` finds it: {problem.file}: tensor {problem.name!r}: block {problem.block}: "
        f"{problem.message}."
        for problem in damaged.report.problems
    ]
    output.paragraph(
        f"4. Damage: one bit is flipped in a copy: byte {flip.offset:,} of {flip.file}, "
        f"from 0x{flip.before:02x} to 0x{flip.after:02x}.",
        *(found if not damaged.report.ok else ["`tensorkeep verify` did not notice."]),
        f"`tensorkeep.load` refuses it: {damaged.refusal}.",
    )


def _print_next(source: Path | None) -> None:
    command = "demo --from YOUR_CHECKPOINT"
    if source is not None:
        command = f"convert {source} smaller --to native --compression lossless"
    print_lines("", f"Next:       tensorkeep {command}")
    print_lines('in Python:  tensorkeep.save(state, "step-1000", compression="lossless")')
