"""``holdfast demo``: save, load, compress, verify and damage a checkpoint, on this machine, beside its peers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.bench.checkpoint_workload import Workload
from holdfast.bench.demonstration import (
    DEFAULT_ROUNDS,
    DEFAULT_SCALE,
    PATIENCE,
    Damaged,
    Demonstration,
    Figure,
    figures,
)
from holdfast.bench.peers import arms
from holdfast.bench.rounds import Rounds
from holdfast.bench.visit import STORED
from holdfast.checkpoint.verify import VerifyReport
from holdfast.cli.output import DEFAULT, Output
from holdfast.cli.text import Table, counted, printable
from holdfast.errors import UsageError
from holdfast.units import format_bytes, format_seconds


def demo(
    *,
    scale: float | None = None,
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    rounds: int | None = None,
    directory: Annotated[Path, Parameter(name="--dir")] = Path(),
    output: Output = DEFAULT,
) -> int:
    """See on this machine what Holdfast does: save, load, compress, verify and damage a checkpoint.

    A state is saved and loaded by torch, safetensors, holdfast and holdfast-lossless in interleaved rounds, each load
    is compared with what was saved, bit for bit, and one flipped bit is looked for. About a minute.

    Parameters
    ----------
    scale
        Of OpenLLaMA-3B: 0.1 has a tenth of its weights, 0.7 GB, which is the default.
    source
        A checkpoint of your own to take instead, of any format.
    rounds
        How often each arm is measured; 3, and fewer on a slow disk, by default.
    directory
        The folder to write in; what is written is removed.
    """
    if source is not None and scale is not None:
        raise UsageError("--from and --scale exclude each other", remedy="give one of them")
    settings = Demonstration(
        directory,
        source,
        DEFAULT_SCALE if scale is None else scale,
        DEFAULT_ROUNDS if rounds is None else rounds,
        PATIENCE if rounds is None else math.inf,
    )
    talk = _Talk(output)
    with settings as demonstration:
        with talk.busy("building the state"):
            workload = demonstration.build()
        talk.say(lambda: _print_state(workload, source))
        with talk.busy("measuring") as note:
            measured = demonstration.compare(_progress(settings.rounds, note))
        talk.say(lambda: _print_comparison(measured))
        with talk.busy("verifying"):
            intact, damaged = demonstration.verify(), demonstration.damage()
        talk.say(lambda: _print_verified(intact, damaged))
    found = intact.ok and not damaged.report.ok
    output.show(_document(workload, source, measured, intact, damaged, found), lambda: _print_next(source))
    return 0 if found else 1


class _Talk:
    """Says what happens: text as it comes, unless JSON or silence was asked for; the present stage on stderr."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def say(self, text: Callable[[], None]) -> None:
        if not (self._output.json or self._output.quiet):
            text()
            sys.stdout.flush()

    @contextmanager
    def busy(self, stage: str) -> Iterator[Callable[[str], None]]:
        if not self._output.progress or self._output.quiet or not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console

        with Console(stderr=True, markup=False).status(stage) as status:
            yield status.update


def _progress(rounds: int, note: Callable[[str], None]) -> Callable[[int, str], None]:
    visits = rounds * len(arms())
    return lambda done, arm: note(f"measuring {arm} ({done + 1} of at most {visits})")


def _print_state(workload: Workload, source: Path | None) -> None:
    what = "a scaled OpenLLaMA-3B in bfloat16" if source is None else printable(str(source))
    _heading(
        "1. The state", f"{what}: {counted(len(workload.flat.leaves), 'tensor')}, {format_bytes(workload.nbytes)}."
    )
    if source is not None:
        print("safetensors holds flat dicts of tensors only, so it gets the flattened tensors and no other value.")


def _print_comparison(rounds: Rounds) -> None:
    done = counted(len(rounds.order), "round")
    _heading(
        "2. Save and load",
        f"Medians of {done} in random order (seed {rounds.seed}); x is times faster than torch in the same round.",
    )
    table = figures(rounds)
    names = [arm.name for arm in arms()]
    rows = [(measure, *(_cell(measure, row.get(name)) for name in names)) for measure, row in table.items()]
    Table(("=", *(f">{name}" for name in names)), rows).show()
    for reason in rounds.not_run.values():
        print(printable(f"not run: {reason}"))
    if not any("cold" in measure for measure in table):
        print("not measured: cold loads, because this file system keeps its files in memory (try another --dir)")
    print("A save ends when it is on the disk (fsync). Cold: nothing in the page cache, as mincore proves.")
    print("Into: tensors that exist, for torch and safetensors by copy_. Only holdfast checks what it loads.")
    print("Every load gave back every bit.")


def _cell(measure: str, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    value = format_bytes(figure.median) if measure == STORED else format_seconds(figure.median)
    ratio = f"{figure.against_torch.median:.2f}x" if figure.against_torch else ""
    return f"{value}  {ratio:>6}"


def _print_verified(intact: VerifyReport, damaged: Damaged) -> None:
    state = "ok" if intact.ok else "corrupt"
    _heading("3. Verify", f"holdfast verify: {state}, {counted(intact.tensors, 'tensor')}, {intact.checked}.")
    flip = damaged.flip
    _heading(
        "4. Damage",
        f"In a copy, byte {flip.offset:,} of {flip.file} was changed from 0x{flip.before:02x} to 0x{flip.after:02x}.",
    )
    for problem in damaged.report.problems:
        print(printable(f"holdfast verify: {problem.file}: tensor {problem.name!r}: block {problem.block}"))
        print(printable(f"                 {problem.message}"))
    if damaged.report.ok:
        print("holdfast verify did not notice.")
    print(printable(f"holdfast.load refuses it: {damaged.refusal}"))


def _print_next(source: Path | None) -> None:
    print()
    own = "holdfast demo --from YOUR_CHECKPOINT" if source is None else f"holdfast convert {source} smaller"
    print(f'Next: {own}, or in Python: holdfast.save(state, "step-1000", compression="lossless")')


def _heading(title: str, sentence: str) -> None:
    print(f"\n{title}: {sentence}")


def _document(
    workload: Workload, source: Path | None, rounds: Rounds, intact: VerifyReport, damaged: Damaged, found: bool
) -> dict[str, Any]:
    return {
        "ok": found,
        "source": None if source is None else str(source),
        "tensors": len(workload.flat.leaves),
        "state_bytes": workload.nbytes,
        "measures": {
            measure: {arm: asdict(figure) for arm, figure in row.items()} for measure, row in figures(rounds).items()
        },
        "rounds": rounds.as_dict(),
        "verify": intact.as_dict(),
        "damage": {
            "flip": asdict(damaged.flip),
            "verify": damaged.report.as_dict(),
            "refusal": damaged.refusal,
        },
    }
