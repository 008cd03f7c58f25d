"""The story of ``tensorkeep demo --training``, told stage by stage."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorkeep.bench.demo.training import KilledRun, RepeatedSteps, TrainingDemo
from tensorkeep.checkpoint.inspect.info import info
from tensorkeep.cli.talk import Talk, say
from tensorkeep.cli.text import counted, printable
from tensorkeep.train.generate import generate, prompt_ids
from tensorkeep.train.run.trained import load_trained
from tensorkeep.units import format_bytes

STEPS = 1200
EVERY = 100
_PROMPT = "def "
_TOKENS = 300


def tell(folder: Path, talk: Talk, *, steps: int = STEPS, every: int = EVERY, source: str = "stdlib") -> dict[str, Any]:
    """Train, kill, go on, compare, generate; return all of it as plain values."""
    story = TrainingDemo(folder, steps=steps, every=every, source=source)
    with talk.busy("preparing the sources of Python's standard library"):
        prepared = story.prepare()
    talk.say(lambda: _print_data(prepared.about))
    with talk.busy("training") as note:
        killed = story.train_until_killed(note)
    talk.say(lambda: _print_killed(killed))
    with talk.busy("going on") as note:
        summary = story.resume(note)
    repeated = story.repeated(killed)
    talk.say(lambda: _print_repeated(killed, repeated, summary))
    last = story.last_checkpoint()
    talk.say(lambda: _print_checkpoint(last.path))
    text = _sample(story)
    talk.say(lambda: _print_sample(text))
    return {
        "ok": repeated.exact,
        "run": str(story.folder.path),
        "checkpoint": last.path,
        "killed": {"step": killed.step, "saved": killed.saved.number},
        "repeated": asdict(repeated),
        "summary": summary,
        "sample": text,
    }


def _sample(story: TrainingDemo) -> str:
    trained = load_trained(story.folder, which="best")
    prompt = prompt_ids(trained.tokenizer, _PROMPT)
    ids = generate(
        trained.model, prompt, max_new_tokens=_TOKENS, temperature=0.8, vocab_size=trained.tokenizer.vocab_size
    )
    return trained.tokenizer.decode(ids.tolist())


def _print_data(about: dict[str, Any]) -> None:
    print()
    tokens = sum(split["tokens"] for split in about["splits"].values())
    say(f"1. The text: the sources of Python's standard library on this machine, {tokens:,} characters.")


def _print_killed(killed: KilledRun) -> None:
    print()
    say(
        f"2. A GPT trains on them, and is saved in the background as it goes. It was killed (kill -9) at step "
        f"{killed.step}, with a loss of {killed.losses[killed.step]:.4f}; its last whole checkpoint is that of step "
        f"{killed.saved.number}."
    )


def _print_repeated(killed: KilledRun, repeated: RepeatedSteps, summary: dict[str, Any]) -> None:
    print()
    if not repeated.exact:
        different = counted(len(repeated.different), "step")
        say(f"3. The run went on, and {different} of {repeated.count} came out DIFFERENT.")
    else:
        say(
            f"3. It went on from there to step {summary['step']}. Steps {repeated.first} to {repeated.last} were "
            f"computed twice, before the kill and after it: all {repeated.count} losses are the same, bit for bit."
        )
    spent = summary["seconds"]
    share = spent.get("checkpoint", 0.0) / sum(spent.values())
    say(
        f"The validation loss is {summary['loss']:.3f}, at {summary['tokens_per_second']:,.0f} tokens/s; saving held "
        f"the loop for {share:.1%} of the time."
    )


def _print_checkpoint(path: str) -> None:
    print()
    about = info(path)
    say(
        f"4. The last checkpoint holds the whole state, {counted(len(about.entries), 'tensor')} of "
        f"{format_bytes(about.total.nbytes)}: weights, optimizer, random states, where it stood in the data."
    )
    print(printable(f"   tensorkeep info {path}"))


def _print_sample(text: str) -> None:
    print()
    say("5. What the model makes up:")
    for line in text.splitlines():
        print(printable(f"   | {line}"))
