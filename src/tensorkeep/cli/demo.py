"""``tensorkeep demo``: speed, damage, kills and training, beside other tools, with one page of HTML."""

import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.demo.damage import damage_and_verify, damage_peers, save_and_verify
from tensorkeep.bench.demo.killed_save import kill_saves
from tensorkeep.bench.demo.results import DemoResults
from tensorkeep.bench.demo.speed import LONGEST_SECONDS, measure_rounds, measure_t5x
from tensorkeep.bench.demo.state import DEFAULT_SCALE, SEED, build_states, scale_of_size, temporary_folder
from tensorkeep.cli import demo_text
from tensorkeep.cli.options import SIZE, AtLeastOne, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.errors import UsageError
from tensorkeep.units import counted, format_bytes

_DEFAULT_ROUNDS = 3
_STEPS, _EVERY = 100, 20
_SMALLEST, _LARGEST = 10**6, 100 * 10**9


def demo(
    *,
    size: Annotated[int | None, SIZE] = None,
    scale: float | None = None,
    source: Annotated[Path | None, Parameter(name="--from", metavar="CHECKPOINT")] = None,
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
        # Imports the trainer, which the other demo does not need.
        from tensorkeep.cli.training_demo import training_demo

        return 0 if training_demo(out or Path("demo-run"), output)["ok"] else 1
    if sum(given is not None for given in (size, scale, source)) > 1:
        raise UsageError("--size, --scale and --from exclude each other", remedy="give one of them")
    if size is not None:
        if not _SMALLEST <= size <= _LARGEST:
            limits = f"{format_bytes(_SMALLEST)} to {format_bytes(_LARGEST)}"
            raise UsageError(f"--size is {format_bytes(size)}, out of range", remedy=f"give {limits}")
        scale = scale_of_size(size)
    from tensorkeep.report.demo_page import write_demo_page
    from tensorkeep.report.rendering import check_page

    page = out or Path("tensorkeep-demo.html")
    check_page(page)
    with temporary_folder(directory) as folder:
        with output.status("building the state"):
            states = build_states(folder, source, DEFAULT_SCALE if scale is None else scale)
        results = _run(output, folder, states, source, rounds)
    write_demo_page(results, page)
    output.show({**results.document(), "page": str(page)}, lambda: demo_text.print_facts(output, results, str(page)))
    return 0 if results.ok else 1


def _run(output: Output, folder: Path, states: StatePair, source: Path | None, rounds: int | None) -> DemoResults:
    """Run the parts, and print each as soon as it is done."""
    from tensorkeep.bench.demo.six_way import compare_six_ways
    from tensorkeep.bench.demo.training import compare_runs

    seconds = LONGEST_SECONDS if rounds is None else math.inf
    with output.status("measuring") as status:
        measured = measure_rounds(
            states, folder, rounds or _DEFAULT_ROUNDS, progress=status, seed=SEED, seconds=seconds
        )
        status("saving and loading with T5X's settings")
        t5x = measure_t5x(states, folder)
    demo_text.print_speed(output, _describe(states, source), states.nbytes, measured, t5x)
    with output.status("flipping a bit"):
        intact = save_and_verify(folder, states)
        damage = damage_and_verify(folder)
        peers = damage_peers(folder, states, damage.flip.name)
    demo_text.print_damage(output, damage, peers)
    with output.status("killing saves"):
        kills = kill_saves(folder, states)
    demo_text.print_kills(output, kills)
    with output.status("training") as status:
        runs = compare_runs(folder, status, steps=_STEPS, every=_EVERY)
    demo_text.print_training(output, runs)
    with output.status("comparing six ways") as status:
        six_way = compare_six_ways(folder, status)
    demo_text.print_six_ways(output, six_way)
    return DemoResults(
        source=None if source is None else str(source),
        description=_describe(states, source),
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


def _describe(states: StatePair, source: Path | None) -> str:
    amount = f"{format_bytes(states.nbytes)} ({counted(len(states.flat.leaves), 'tensor')})"
    return (
        f"{amount} of random bfloat16 weights in the shapes of OpenLLaMA-3B"
        if source is None
        else f"{amount} of {source}"
    )
