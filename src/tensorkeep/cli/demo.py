"""``tensorkeep demo``: save, load, compress, verify and damage a checkpoint, on this machine, beside its peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tensorkeep.bench.checkpoint.measure import STORED
from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS
from tensorkeep.bench.checkpoint.workload import MEASURES
from tensorkeep.bench.demo.checkpoint import (
    DEFAULT_ROUNDS,
    DEFAULT_SCALE,
    LONGEST_SECONDS,
    CheckpointDemo,
    DamageReport,
    Figure,
    figures,
)
from tensorkeep.bench.run.rounds import Rounds
from tensorkeep.checkpoint.load.verify import VerifyReport
from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.talk import Talk, say
from tensorkeep.cli.text import Table, counted, printable
from tensorkeep.errors import UsageError
from tensorkeep.units import format_bytes, format_seconds

_LABELS = {measure.name: measure.label for measure in MEASURES}

_MEANINGS = {
    # By what stands in the names of the measures.
    "save": "until the checkpoint is safely on the disk (fsync)",
    "cold": "read from the disk: nothing of the files was in memory before",
    "warm": "the operating system still has the files in memory",
    "into": "into tensors that exist already, as when a training run goes on",
}


def demo(
    *,
    scale: float | None = None,
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    rounds: int | None = None,
    directory: Annotated[Path, Parameter(name="--dir")] = Path(),
    training: Annotated[bool, Switch] = False,
    out: Path = Path("demo-run"),
    output: Output = DEFAULT,
) -> int:
    """Save, load, verify and damage a checkpoint, beside torch and safetensors.

    A state is saved and loaded by torch, safetensors, tensorkeep and tensorkeep-lossless in interleaved rounds, each
    load is compared with what was saved, bit for bit, and one flipped bit is looked for. It takes about a minute. With
    --training a small GPT is trained instead, killed, and goes on; that takes about two.

    Parameters
    ----------
    scale
        How much of OpenLLaMA-3B to make up: 0.1, the default, is a tenth of its weights, 0.7 GB.
    source
        A checkpoint of your own to take instead, of any format.
    rounds
        How often each of the four is measured; 3 by default, and fewer on a slow disk.
    directory
        The folder to write in; what is written is removed.
    training
        Train a model, kill it, go on, compare what was done twice, and generate text.
    out
        The run's folder of --training; it must not exist, and stays.
    """
    if training:
        return _train(out, output)
    if source is not None and scale is not None:
        raise UsageError("--from and --scale exclude each other", remedy="give one of them")
    settings = CheckpointDemo(
        directory,
        source,
        DEFAULT_SCALE if scale is None else scale,
        DEFAULT_ROUNDS if rounds is None else rounds,
        LONGEST_SECONDS if rounds is None else math.inf,
    )
    talk = Talk(output)
    with settings as demonstration:
        with talk.busy("building the state"):
            subject = demonstration.build()
        talk.say(lambda: _print_state(subject, source, settings.scale))
        with talk.busy("measuring") as note:
            measured = demonstration.compare(_progress(settings.rounds, note))
        talk.say(lambda: _print_comparison(measured))
        with talk.busy("verifying"):
            intact, damaged = demonstration.verify(), demonstration.damage()
        talk.say(lambda: _print_verified(intact, damaged))
    found = intact.ok and not damaged.report.ok
    output.show(_document(subject, source, measured, intact, damaged, found), lambda: _print_next(source))
    return 0 if found else 1


def _train(out: Path, output: Output) -> int:
    # Imports torch's training parts, which the other demo has no use for.
    from tensorkeep.cli.training_demo import tell

    document = tell(out, Talk(output))
    output.show(document, lambda: _print_next_training(document))
    return 0 if document["ok"] else 1


def _print_next_training(document: dict[str, Any]) -> None:
    print()
    print(printable(f"Next:  tensorkeep generate {document['run']} --prompt 'class '"))
    print(printable(f"       tensorkeep bench checkpoint --experiment six-way --from {document['checkpoint']}"))


def _progress(rounds: int, note: Callable[[str], None]) -> Callable[[int, str], None]:
    visits = rounds * len(COMMON_TOOLS)
    return lambda done, arm: note(f"measuring {arm} ({done + 1} of at most {visits})")


def _print_state(subject: StatePair, source: Path | None, scale: float) -> None:
    made_up = f"random bfloat16 weights, with the names and shapes of OpenLLaMA-3B scaled by {scale:g}"
    what = made_up if source is None else str(source)
    amount = f"{counted(len(subject.flat.leaves), 'tensor')}, {format_bytes(subject.nbytes)}"
    print()
    say(f"1. The state: {amount}: {what}.")
    if source is not None:
        say("safetensors can hold nothing but tensors under flat names, so that is all it is given.")


def _print_comparison(rounds: Rounds) -> None:
    done = counted(rounds.count, "round")
    print()
    say(
        "2. Save and load: by torch, safetensors, tensorkeep, and tensorkeep with lossless compression; the median of "
        f"{done}, each in random order. 2.00x: twice as fast as torch in the same round. 66%: of the bytes that torch "
        "takes on the disk."
    )
    print()
    table = figures(rounds)
    names = list(COMMON_TOOLS)
    rows = [
        (_LABELS[measure], *(_cell(name, measure, row.get(name)) for name in names)) for measure, row in table.items()
    ]
    Table(("=", *(f">{name}" for name in names)), rows).show()
    print()
    for reason in rounds.not_run.values():
        say(f"not run: {reason}")
    for measure, meaning in _MEANINGS.items():
        if any(measure in measured for measured in table):
            say(f"{measure}: {meaning}")
    if not any("cold" in measured for measured in table):
        say("cold: not measured, because this file system keeps its files in memory (try another --dir)")
    say("Every load gave back every bit. Of the four, only the two of tensorkeep check what they load for damage.")


def _cell(arm: str, measure: str, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    value = format_bytes(figure.median) if measure == STORED else format_seconds(figure.median)
    if figure.against_torch is None or arm == "torch":
        return value
    ratio = figure.against_torch.median
    return f"{value}  {f'{ratio:.0%}' if measure == STORED else f'{ratio:.2f}x':>6}"


def _print_verified(intact: VerifyReport, damaged: DamageReport) -> None:
    verdict = "all is well" if intact.ok else "it is corrupt"
    print()
    say(
        f"3. Verify: `tensorkeep verify` reads all {counted(intact.tensors, 'tensor')} and checks the checksums "
        f"({intact.checked}): {verdict}."
    )
    flip = damaged.flip
    print()
    say(
        f"4. Damage: in a copy, one bit was flipped: byte {flip.offset:,} of {flip.file}, "
        f"from 0x{flip.before:02x} to 0x{flip.after:02x}."
    )
    for problem in damaged.report.problems:
        where = f"{problem.file}: tensor {problem.name!r}: block {problem.block}"
        say(f"`tensorkeep verify` finds it: {where}: {problem.message}.")
    if damaged.report.ok:
        say("`tensorkeep verify` did not notice.")
    say(f"`tensorkeep.load` refuses it: {damaged.refusal}.")


def _print_next(source: Path | None) -> None:
    lossless = "--to native --compression lossless"
    own = (
        "tensorkeep demo --from YOUR_CHECKPOINT"
        if source is None
        else f"tensorkeep convert {source} smaller {lossless}"
    )
    print()
    print(printable(f"Next:       {own}"))
    print('in Python:  tensorkeep.save(state, "step-1000", compression="lossless")')


def _document(
    subject: StatePair, source: Path | None, rounds: Rounds, intact: VerifyReport, damaged: DamageReport, found: bool
) -> dict[str, Any]:
    return {
        "ok": found,
        "source": None if source is None else str(source),
        "tensors": len(subject.flat.leaves),
        "state_bytes": subject.nbytes,
        "measures": {
            measure: {arm: asdict(figure) for arm, figure in row.items()} for measure, row in figures(rounds).items()
        },
        "rounds": msgspec.to_builtins(rounds),
        "verify": intact.as_dict(),
        "damage": {
            "flip": asdict(damaged.flip),
            "verify": damaged.report.as_dict(),
            "refusal": damaged.refusal,
        },
    }
