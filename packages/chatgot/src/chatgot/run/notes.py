"""What the user should know before a run trains: settings without effect, and how a segment or branch continues."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from chatgot.config.config import Config, flat
from chatgot.data.dataset import Dataset
from chatgot.model.config import ModelConfig
from chatgot.optim.schedules import SCHEDULES, learning_rate_factor
from chatgot.run.folder import Changes, RunFolder, Segment
from chatgot.run.weights import InitialWeights
from chatgot.techniques.stack import Stack


def ineffective_settings(config: Config) -> list[str]:
    """Return a note for each setting, other than its default, that has no effect in a run, or not the one it states."""
    return [*_warm_up(config), *_evaluations(config), *_without(config)]


def _warm_up(config: Config) -> Iterator[str]:
    # The schedule covers the steps after its start only.
    warmup, steps = config.schedule.warmup_steps, config.loop.steps - config.schedule.start
    decays = SCHEDULES[config.schedule.name].decays
    if warmup > steps or (decays and warmup == steps and config.schedule.final < 1):
        reached = learning_rate_factor(config.schedule, config.loop.steps, config.loop.steps)
        decay = ", and does not decay" if decays and warmup == steps else ""
        yield (
            f"schedule.warmup_steps is {warmup:,}, and the schedule has {steps:,} steps: the learning rate ends at "
            f"{reached:.0%} of its peak{decay}; for a shorter warm-up: --schedule.warmup_steps {steps // 10}"
        )


def _evaluations(config: Config) -> Iterator[str]:
    every, steps = config.eval.every, config.loop.steps
    # An evaluation after the last step comes too late to change anything.
    count = 0 if every == 0 else (steps - 1) // every
    waits = {"eval.patience": config.eval.patience}
    if config.schedule.name == "plateau":
        waits["schedule.patience"] = config.schedule.patience
    for name, patience in waits.items():
        if patience is not None and count <= patience:
            yield (
                f"{name} is {patience:,}, and eval.every {every:,} gives {count:,} evaluations before the last of "
                f"{steps:,} steps: {patience + 1:,} are needed for an effect"
            )


def _without(config: Config) -> Iterator[str]:
    sample, steps, schedule, optimizer = config.sample, config.loop.steps, config.schedule.name, config.optim.name
    # A section, some of its settings, whether what they need is there, and the reason if not.
    needs: list[tuple[str, str, bool, str]] = []
    for names in ("decay", "patience factor", "final"):
        users = [name for name, each in SCHEDULES.items() if names.split()[0] in each.uses]
        reason = f"schedule.name is {schedule!r}, not {' or '.join(map(repr, users))}"
        needs.append(("schedule", names, schedule in users, reason))
    batches = f"eval.batches is {config.eval.batches}, which decides"
    needs.append(("eval", "tokens", config.eval.batches is None, batches))
    for section in ("checkpoint", "eval", "log", "sample"):
        needs.append((section, "every", getattr(config, section).every <= steps, f"the run has {steps:,} steps"))
    unused = f"sample.every is {sample.every:,}: no sample is generated"
    unknown = "eval.every is 0: no step is known to be the best before the last one"
    muon = f"optim.name is {optimizer!r}, not 'muon'"
    needs += [
        ("sample", "top_k", sample.temperature > 0, "sample.temperature is 0: the likeliest token is taken"),
        ("sample", "prompt tokens temperature top_k", 0 < sample.every <= steps, unused),
        ("checkpoint", "keep_best", config.eval.every > 0 or not config.checkpoint.keep_best, unknown),
        ("optim", "muon_lr muon_momentum muon_steps muon_polynomials muon_beta2 muon_split", optimizer == "muon", muon),
        ("model", "rope_base", config.model.positions == "rotary", "model.positions is 'learned'"),
    ]
    # Sizes of a model have no defaults.
    plain = ModelConfig(vocab_size=1, context_length=1, n_layers=1, n_heads=1, d_model=2)
    values, defaults = flat(config.as_dict()), flat(Config(recipe="", model=plain).as_dict())
    for section, names, met, reason in needs:
        settings = [f"{section}.{name}" for name in names.split()]
        changed = [name for name in settings if values[name] != defaults[name]]
        if changed and not met:
            yield f"{' and '.join(changed)} {'have' if changed[1:] else 'has'} no effect: {reason}"


def on_initial_weights(initial: InitialWeights, config: Config, dataset: Dataset) -> Iterator[str]:
    """Yield where the initial weights came from, and what differs between their tokens and the tokens of the data."""
    record = initial.record
    yield f"initial weights: {record.path}{'' if record.step is None else f', step {record.step}'}"
    if initial.tokenizer is None:
        yield "the tokenizer of the initial weights is not known: the tokens of the data were not compared"
    elif initial.tokenizer.opening != dataset.tokenizer.opening:
        names = [each.decode(each.opening) or "nothing" for each in (initial.tokenizer, dataset.tokenizer)]
        yield (
            f"documents begin with {names[1]} in the data, and with {names[0]} for the initial weights: prepare "
            "the data again to train as they were trained"
        )
    if new := initial.new_tokens(config.model):
        # New tokens either belong to the tokenizer and occur in no text, or mark messages of conversations.
        what = "the tokenizer" if initial.tokens_in_no_text else "conversations"
        yield f"{new} tokens of {what} are new to the weights, and begin as the mean of all others"


def on_segment(number: int, segment: Segment, before: Config, reduced: float) -> str:
    """Return what changes in a segment, and how its learning rate continues; see `on_rates`."""
    config, step = segment.config, segment.step
    text = f"segment {number} begins after step {step}: {describe(segment.settings)}"
    whole = f"that of a run of {config.loop.steps} steps from the start"
    extended = set(segment.settings) == {"loop.steps"}
    # Only for segment 2, the first change of a run: earlier changes may have changed its result.
    if extended and number == 2 and _is_as_from_the_start(before, config, step):
        return f"{text}; its result is {whole}"
    rates = on_rates(before, config, step, reduced)
    return f"{text}; {rates}, and the result differs from {whole}" if extended else f"{text}; {rates}"


def on_rates(before: Config, config: Config, step: int, reduced: float) -> str:
    """Return how the learning rate continues after a step, given the factor that "plateau" has reduced it by."""
    # The evaluation after the step may have reduced the rate of "plateau": the step itself had a higher rate, which is
    # not known here.
    earlier = "" if before.schedule.name == "plateau" else f"from {_rate(before, step):.3g} "
    return (
        f"the learning rate goes {earlier}to {_rate(config, step + 1) * reduced:.3g} "
        f"({config.schedule.name} over steps {config.schedule.start + 1} to {config.loop.steps})"
    )


def segments_of(folder: Path) -> tuple[dict[str, object], list[str]]:
    """Return the origin and the later segments of the run in a folder, as JSON and as text, for ``tensorkeep log``."""
    record = RunFolder(folder).record()
    origin, segments, lines = record.origin, [], []
    if origin is not None:
        lines.append(f"branched from {origin.run} after step {origin.step}: {describe(origin.settings)}")
    # The record lists later segments only: the first one is the run as it was started.
    for number, segment in enumerate(record.segments, 2):
        about = {"step": segment.step, "time": segment.time, "settings": segment.settings}
        segments.append({"segment": number, "leg": number, **about})
        lines.append(f"segment {number} began after step {segment.step}, {segment.time}: {describe(segment.settings)}")
    # `legs` and `leg` are older names, which scripts may read.
    document = {"segments": segments, "legs": segments}
    return document | {"origin": None if origin is None else msgspec.to_builtins(origin)}, lines


def describe(settings: Changes) -> str:
    return ", ".join(f"{name} {_in_words(before)} -> {_in_words(after)}" for name, (before, after) in settings.items())


def _in_words(value: object) -> str:
    return "none" if value is None else "on" if value == {} else str(value)


def on_evaluations(before: Config, config: Config, step: int) -> Iterator[str]:
    if (config.eval.tokens, config.eval.batches) != (before.eval.tokens, before.eval.batches) and step:
        yield (
            "validation losses are measured on other windows from now on: do not compare them with earlier ones; early "
            "stopping and plateau begin again"
        )


def _rate(config: Config, step: int) -> float:
    # At least the first step: a run or a branch that has not made one begins at its rate.
    return config.optim.lr * learning_rate_factor(
        config.schedule, max(step, config.schedule.start + 1), config.loop.steps
    )


def _is_as_from_the_start(before: Config, config: Config, step: int) -> bool:
    if any(_rate(before, each) != _rate(config, each) for each in range(before.schedule.start + 1, step + 1)):
        return False
    # The last step of a run is evaluated in any case, which the schedule "plateau" counts.
    evaluated = step == before.loop.steps and step % (before.eval.every or step) != 0
    # Early stopping counts it as well, and a segment begins that count again.
    counted = (before.schedule.name == "plateau" and evaluated) or before.eval.patience is not None
    return not counted and not any(each.depends_on_steps for each in Stack.of(before.techniques).techniques)
