"""``tensorkeep demo --training``: train, kill, resume, compare losses, generate text."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorkeep.bench.demo.training import RepeatedSteps, TrainingDemo
from tensorkeep.checkpoint.info import info
from tensorkeep.cli.output import Output
from tensorkeep.train.generate import generate, prompt_ids
from tensorkeep.train.run.trained import load_trained
from tensorkeep.units import counted, format_bytes

_PROMPT = "def "
_TOKENS = 300


def training_demo(
    folder: Path, output: Output, *, steps: int = 1200, every: int = 100, source: str = "stdlib"
) -> dict[str, Any]:
    """Run the demo, which saves a checkpoint ``every`` so many steps; print and return its document."""
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
        f"{killed.step}, with a loss of {killed.losses[killed.step]:.4f}; its last complete checkpoint is that of step "
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
    trained = load_trained(demo.folder, which="best")
    prompt, size = prompt_ids(trained.tokenizer, _PROMPT), trained.tokenizer.vocab_size
    ids = generate(trained.model, prompt, max_new_tokens=_TOKENS, temperature=0.8, vocab_size=size)
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
