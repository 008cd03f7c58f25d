"""``tensorkeep demo``: speed, damage, kills and training beside other tools. ``bench/demo`` has the parts, this module
their order and their text."""

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from tensorkeep.errors import UsageError
from tensorkeep.ext import counted, format_bytes
from tensorkeep.ext.cli import DEFAULT, SIZE, AtLeastOne, Checkpoint, Output, Switch
from tensorkeep.ext.pages import Bars, check_page
from tensorkeep_bench.analysis.samples import SMALLEST_STATE
from tensorkeep_bench.checkpoint.states import StatePair
from tensorkeep_bench.demo import faults, speed
from tensorkeep_bench.demo import training as training_part
from tensorkeep_bench.demo.training import RepeatedSteps, TrainingDemo
from tensorkeep_bench.report.demo import DemoResults, facts, six_way_bars, speed_bars, write_demo_page
from tensorkeep_bench.report.html import REPORT
from tensorkeep_bench.results import Results

_DEFAULT_ROUNDS = 3
_STEPS, _EVERY = 100, 20
_SMALLEST, _LARGEST = 10**6, 100 * 10**9

# Columns of a bar chart: together at most 79 with the gaps.
_LABEL, _BAR, _TEXT = 24, 34, 12


def demo(
    *,
    size: Annotated[int | None, SIZE] = None,
    scale: float | None = None,
    source: Checkpoint = None,
    rounds: Annotated[int | None, AtLeastOne] = None,
    directory: Annotated[Path, Parameter(name="--dir")] = Path(),
    training: Annotated[bool, Switch] = False,
    out: Path | None = None,
    output: Output = DEFAULT,
) -> int:
    """Show on this machine what Tensorkeep does, in about two minutes.

    It saves and loads 0.7 GB beside torch, safetensors, TensorStore and T5X; flips a bit; kills a save, and a training
    run, with kill -9; and compares six ways to checkpoint. The results are printed, and written as one page of HTML.

    Parameters
    ----------
    size
        The size of the state, such as 200MB; 0.7 GB by default.
    scale
        The same as a fraction of OpenLLaMA-3B, which has 6.9 GB: 0.1 by default.
    source
        Use the state of this checkpoint instead, of any format.
    rounds
        Number of rounds of the comparison; 3 by default, and fewer on a slow machine.
    directory
        The folder to measure in; what is written there is removed.
    training
        Only train a model: kill it, resume it, compare the steps that were computed twice, and generate text.
    out
        The page to write, tensorkeep-demo.html by default. With --training: the folder of the run, demo-run by default,
        which must not exist and is kept.
    """
    if training:
        return 0 if training_demo(out or Path("demo-run"), output)["ok"] else 1
    if sum(given is not None for given in (size, scale, source)) > 1:
        raise UsageError("--size, --scale and --from exclude each other", remedy="give only one")
    if size is not None:
        if not _SMALLEST <= size <= _LARGEST:
            limits = f"{format_bytes(_SMALLEST)} to {format_bytes(_LARGEST)}"
            raise UsageError(f"--size is {format_bytes(size)}, out of range", remedy=f"give {limits}")
        scale = speed.scale_of_size(size)
    page = out or Path("tensorkeep-demo.html")
    # Before the measurement, which takes minutes.
    check_page(page, REPORT)
    # Nothing of the demo stays but its page, also after Ctrl-C.
    with speed.temporary_folder(directory) as folder:
        with output.status("building the state"):
            states = speed.build_states(folder, source, speed.DEFAULT_SCALE if scale is None else scale)
        results = _run(output, folder, states, source, rounds)
    write_demo_page(results, page)
    output.show({**results.document(), "page": str(page)}, lambda: _print_facts(output, results, str(page)))
    return 0 if results.ok else 1


def _run(output: Output, folder: Path, states: StatePair, source: Path | None, rounds: int | None) -> DemoResults:
    # Each part is printed as soon as it is done, because the demo takes two minutes.
    # Fewer rounds on a slow machine, unless the user asked for a number.
    seconds = speed.LONGEST_SECONDS if rounds is None else math.inf
    with output.status("measuring") as status:
        measured = speed.measure_rounds(
            states, folder, rounds or _DEFAULT_ROUNDS, progress=status, seed=speed.SEED, seconds=seconds
        )
        status("saving and loading with T5X's settings")
        t5x = speed.measure_t5x(states, folder)
    _print_speed(output, _description(states, source), states.nbytes, measured, t5x)
    with output.status("flipping a bit"):
        intact = faults.save_and_verify(folder, states)
        damage = faults.damage_and_verify(folder)
        peers = faults.damage_peers(folder, states, damage.flip.name)
    heading = f"2. One bit is flipped in the checkpoint of every tool, in tensor {damage.flip.name}."
    _print_part(output, heading, [*(each.text() for each in peers), *damage.texts()])
    with output.status("killing saves"):
        kills = faults.kill_saves(folder, states)
    heading = "3. kill -9 in the middle of a save that replaces the checkpoint."
    _print_part(output, heading, [each.text() for each in kills])
    with output.status("training") as status:
        runs = training_part.compare_runs(folder, status, steps=_STEPS, every=_EVERY)
    _print_part(output, f"4. {runs.text()}", [])
    with output.status("comparing six ways") as status:
        six_way = speed.compare_six_ways(folder, status)
    _print_six_ways(output, six_way)
    return DemoResults(
        source=None if source is None else str(source),
        description=_description(states, source),
        tensors=len(states.flat.leaves),
        state_bytes=states.nbytes,
        rounds=measured,
        t5x=t5x,
        intact=intact,
        damage=damage,
        peers=peers,
        kills=kills,
        training=runs,
        six_way=six_way,
    )


def _description(states: StatePair, source: Path | None) -> str:
    of = source or "random bfloat16 weights in the shapes of OpenLLaMA-3B"
    return f"{format_bytes(states.nbytes)} ({counted(len(states.flat.leaves), 'tensor')}) of {of}"


def _print_part(output: Output, heading: str, lines: list[str]) -> None:
    output.paragraph(heading, *(f"   {line}" for line in lines))


def _print_speed(output: Output, description: str, nbytes: int, rounds: Results, t5x: speed.SmallRun) -> None:
    output.paragraph(
        f"1. Save and load {description}: the median of {counted(rounds.blocks, 'round')}. In a round "
        "every tool runs once, in random order. A save ends when the checkpoint is on the disk (fsync, for every "
        "tool). Each load is the first in a new process, of files in the page cache."
    )
    _print_bars(output, speed_bars(rounds, t5x, nbytes))
    sentences = speed.notes(rounds, t5x)
    if nbytes < SMALLEST_STATE:
        small = f"Below {format_bytes(SMALLEST_STATE)}, opening files and caches dominate"
        sentences.append(f"{small}: these times say little about large states.")
    sentences.append(
        "Every load returned every bit. tensorkeep and tensorstore verify checksums while they load, torch and "
        "safetensors do not. safetensors maps the file instead of reading it."
    )
    output.paragraph(*(f"   {sentence}" for sentence in sentences))


def _print_six_ways(output: Output, results: Results) -> None:
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


def _print_facts(output: Output, results: DemoResults, page: str) -> None:
    output.paragraph("In short, on this machine, just now:", *(f" - {line}" for line in facts(results)))
    output.print_lines("", f"The page with plots and tables: {page}")


def print_bars(bars: Bars) -> None:
    """Print a title and a bar per line. ``>`` marks a bar that is longer than the scale, and cut off."""
    # rich would assume 80 columns in a pipe.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    # Printing a block character would end the demo under LC_ALL=C.
    block = "#" if "█".encode(sys.stdout.encoding or "ascii", "replace") == b"?" else "█"
    width = max(1, min(_BAR, console.width - _LABEL - _TEXT))
    console.print(Text(f"   {bars.title}", style="bold"))
    for bar in bars.bars:
        # At least one character, so that a small value is visible.
        length = max(1, round(width * min(1.0, bar.value / bars.full)))
        drawn = block * length
        if bar.value > bars.full * 1.001:
            drawn = drawn[:-1] + ">"
        style = "bold cyan" if bar.tone == "good" else "dim"
        console.print(Text.assemble(f"   {bar.label:<{_LABEL - 3}}", (f"{drawn:<{width}}", style), f"  {bar.text}"))


def training_demo(
    folder: Path, output: Output, *, steps: int = 1200, every: int = 100, source: str = "stdlib"
) -> dict[str, Any]:
    """Train, kill, resume, compare losses, generate text. ``every`` is the number of steps between two checkpoints."""
    # Only here, because the other demo runs the trainer in processes of their own.
    from chatgot.data.tokenizers.base import prompt_ids
    from chatgot.generate import generate
    from chatgot.run.weights import load_trained_at
    from tensorkeep import info

    demo = TrainingDemo(folder, steps=steps, every=every, source=source)
    with output.status("preparing the sources of Python's standard library"):
        splits = demo.prepare().description["splits"]
    characters = sum(split["tokens"] for split in splits.values())
    output.paragraph(
        f"1. The text: the sources of Python's standard library on this machine, {characters:,} characters."
    )
    with output.status("training") as status:
        killed = demo.train_until_killed(status)
    output.paragraph(
        "2. A GPT trains on it, and saves checkpoints in the background. It was killed (kill -9) at step "
        f"{killed.step}, with a loss of {killed.losses[killed.step]:.4f}; its last complete checkpoint has step "
        f"{killed.saved.number}."
    )
    with output.status("resuming") as status:
        summary = demo.resume(status)
    repeated = demo.repeated(killed)
    _print_repeated(output, repeated, summary)
    last = demo.last_checkpoint()
    state = info(last.path)
    output.paragraph(
        f"4. The last checkpoint holds the whole state, {counted(len(state.entries), 'tensor')} of "
        f"{format_bytes(state.total.nbytes)}: weights, optimizer, random states, position in the data."
    )
    output.print_lines(f"   tensorkeep info {last.path}")
    trained = load_trained_at(demo.folder.path, which="best")
    prompt, size = prompt_ids(trained.tokenizer, "def "), trained.tokenizer.vocab_size
    ids = generate(trained.model, prompt, max_new_tokens=300, temperature=0.8, vocab_size=size)
    sample = trained.tokenizer.decode(ids.tolist())
    output.paragraph("5. The model generates:")
    output.print_lines(*(f"   | {line}" for line in sample.splitlines()))
    output.print_lines(
        "",
        f"Next:  tensorkeep generate {demo.folder.path} --prompt 'class '",
        f"       tensorkeep bench checkpoint --experiment six-way --from {last.path}",
    )
    document = {
        "ok": repeated.exact,
        "run": str(demo.folder.path),
        "killed": {"step": killed.step, "saved": killed.saved.number},
        "repeated": asdict(repeated),
        "summary": summary,
        "checkpoint": last.path,
        "sample": sample,
    }
    output.show(document, lambda: None)
    return document


def _print_repeated(output: Output, repeated: RepeatedSteps, summary: dict[str, Any]) -> None:
    if repeated.exact:
        verdict = (
            f"3. The run resumed there and trained to step {summary['step']}. Steps {repeated.first} to "
            f"{repeated.last} were computed twice, before the kill and after it: all {repeated.count} losses are the "
            "same, bit for bit."
        )
    else:
        different = counted(len(repeated.different), "step")
        verdict = f"3. The run resumed, and the losses of {different} of {repeated.count} are DIFFERENT."
    spent = summary["seconds"]
    fraction = spent.get("checkpoint", 0.0) / sum(spent.values())
    output.paragraph(
        verdict,
        f"The validation loss is {summary['loss']:.3f}, at {summary['tokens_per_second']:,.0f} tokens/s; saving "
        f"blocked the loop for {fraction:.1%} of the time.",
    )
