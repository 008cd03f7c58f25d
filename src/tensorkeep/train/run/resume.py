"""What may change when a run resumes: settings that only observe it, and settings that begin a new leg of it.

A *leg* is the part of a run after a step, from which it computes with other settings. ``run.json`` lists the legs, so
that each of them resumes exactly. The rules of what a leg may change hold for a branch of a run as well.
"""

import shlex
from collections.abc import Collection

from tensorkeep.errors import CorruptCheckpointError, UsageError
from tensorkeep.train.config.config import TECHNIQUES, Config, differences
from tensorkeep.train.optim.schedules import learning_rate_factor
from tensorkeep.train.run.folder import Changes, Leg, RunFolder, RunRecord, now
from tensorkeep.train.techniques.distributed import PARALLEL_TECHNIQUES
from tensorkeep.train.techniques.stack import Stack

_KEPT = ("log.", "eval.", "sample.", "checkpoint.", "loop.on_divergence", "loop.fill_memory")
"""Prefixes of the settings that a resumed run may change, and that later resumes keep. They do not affect the weights
of a step, with the exception in `_begins_leg`."""

_OF_ONE_RESUME = (
    "loop.device",
    "loop.threads",
    "data.source",
    *(f"{TECHNIQUES}{name}" for name in PARALLEL_TECHNIQUES),
)
"""Prefixes of the settings that depend on where a run is resumed; they affect rounding only."""

# fmt: off
_OF_A_LEG = (
    "schedule.", "loop.steps", "loop.batch_size", "loop.accumulate", "data.order", "model.dropout", "ema.decay",
    "optim.lr", "optim.muon_lr", "optim.muon_momentum", "optim.muon_steps", "optim.weight_decay", "optim.beta1",
    "optim.beta2", "optim.eps", "optim.clip", TECHNIQUES,
)
# fmt: on
"""Prefixes of the settings that begin a new leg, because the state of a run fits them; restoring checks techniques."""

_SET_BY = {"lr-plateau": "schedule.name", "lr-range-test": "schedule.name", "fused-optimizer": "optim.implementation"}
"""Settings that a technique has set when the run began, and which stay when it is turned off."""

_OF_A_BRANCH = ("data.", "loop.seed")
"""Prefixes of the settings that a branch may change, too. Its data must have the tokenizer of the run."""


def current_config(record: RunRecord) -> Config:
    """Return the configuration of a run's last leg with the changes of its last resume that are kept."""
    changes = record.resumed[-1].settings if record.resumed else {}
    # Before there were legs, a run could only become longer, and that was recorded here.
    kept = (*_KEPT, "loop.steps")
    return record.last_config.changed({name: now for name, (_, now) in changes.items() if name.startswith(kept)})


def leg_settings(before: Config, config: Config, folder: RunFolder, *, branch: bool = False) -> Changes:
    """Return the changed settings that begin a leg or a branch; UsageError if one of the others must not change."""
    changes = differences(before, config)
    for technique, name in _SET_BY.items():
        if technique in before.techniques and technique not in config.techniques and name not in changes:
            raise UsageError(
                f"techniques.{technique} is turned off, and {name} would stay as it has set it: "
                f"{before.setting(name)!r}",
                path=folder.path,
                remedy=f"state another {name}, too" if name.startswith(_OF_A_LEG) else "leave the technique on",
            )
    found = {name: values for name, values in changes.items() if _begins_leg(name, before)}
    free = (*_KEPT, *_OF_ONE_RESUME, *(_OF_A_BRANCH if branch else ()))
    refused = [
        f"{name}: {values[0]!r} then, {values[1]!r} now{_reason(name)}"
        for name, values in changes.items()
        if (name not in found and not name.startswith(free)) or (name == "ema.decay" and 0 in values)
    ]
    if refused:
        raise UsageError(
            f"was started with another configuration: {'; '.join(refused)}",
            path=folder.path,
            remedy=f"leave these settings out to {'branch from' if branch else 'resume with those of'} the run, or "
            "start a new run in another --out",
        )
    return found


def _begins_leg(name: str, before: Config) -> bool:
    if name.startswith(_OF_ONE_RESUME):
        return False
    # This schedule depends on the evaluations.
    evaluations = ("eval.every", "eval.tokens", "eval.batches")
    return name.startswith(_OF_A_LEG) or (name in evaluations and before.schedule.name == "plateau")


def _reason(name: str) -> str:
    """Return why a setting must not change, as a remark that may be empty."""
    if name == "ema.decay":
        return " (the average of the weights begins with the run)"
    if name.startswith("model."):
        return " (the weights of the run have the shape of its model)"
    if name in ("data.tokenizer", "data.vocab_size"):
        return " (the model has the vocabulary of its tokenizer)"
    return ""


def legs_after(record: RunRecord, config: Config, step: int, folder: RunFolder) -> list[Leg]:
    """Return the legs of a run that resumes after a step with a configuration.

    If settings have changed, the last one is new. A leg in which no step was done is replaced.

    Raises UsageError if the leg has no steps; CorruptCheckpointError if the checkpoint before the last leg is damaged.
    """
    if record.legs and step < (began := record.legs[-1].step):
        raise CorruptCheckpointError(
            f"the last leg of the run began after step {began}, and the last undamaged checkpoint is of step {step}",
            path=folder.checkpoints,
            remedy=f"copy step {began} back, or begin another run there: tensorkeep train --branch "
            f"{shlex.quote(f'{folder.path}@{step}')} --out NEW",
        )
    if not leg_settings(current_config(record), config, folder):
        return record.legs
    kept = [leg for leg in record.legs if leg.step < step]
    before = kept[-1].config if kept else record.config
    after = config.changed(_of_one_resume(before))
    settings = leg_settings(before, after, folder)
    check_steps(config, step, folder)
    return [*kept, Leg(step=step, time=now(), settings=settings, config=after)] if settings else kept


def _of_one_resume(config: Config) -> dict[str, object]:
    """Return the settings of a configuration that depend on where a run is resumed."""
    techniques = {f"{TECHNIQUES}{name}": config.techniques.get(name, "off") for name in PARALLEL_TECHNIQUES}
    return {name: config.setting(name) for name in _OF_ONE_RESUME if not name.startswith(TECHNIQUES)} | techniques


def check_steps(config: Config, step: int, folder: RunFolder) -> None:
    """Raise UsageError if a leg or a branch that begins after a step has no steps, or a schedule that begins later."""
    if config.loop.steps <= step:
        raise UsageError(
            f"loop.steps is {config.loop.steps}, and {step} steps are done: none is left for the changed settings",
            path=folder.path,
            remedy=f"give the last step of the run, counted from its start: --loop.steps {2 * step}, for example",
        )
    if config.schedule.start > step:
        raise UsageError(
            f"schedule.start is {config.schedule.start}, and the next step is {step + 1}",
            # The start need not be what the user gave: it is that of a checkpoint that has turned out to be damaged.
            remedy=f"give {step} or less, such as --schedule.start {step}" if step else "leave it out",
        )


def with_schedule_start(config: Config, before: Config, given: Collection[str], step: int) -> Config:
    """Return a configuration whose schedule begins after a step, without warm-up, if its schedule is another one.

    What the user gave explicitly is not changed; ``given`` holds the dotted names of those settings.
    """
    if not any(name.startswith("schedule.") for name in differences(before, config)):
        return config
    defaults = {"schedule.start": step, "schedule.warmup_steps": 0}
    return config.changed({name: value for name, value in defaults.items() if name not in given})


def note_on_leg(number: int, leg: Leg, before: Config, reduced: float) -> str:
    """Return what changes in a leg, and how its learning rate continues; see `note_on_rates`."""
    config, step = leg.config, leg.step
    text = f"leg {number} begins after step {step}: {describe(leg.settings)}"
    whole = f"that of a run of {config.loop.steps} steps from the start"
    extended = set(leg.settings) == {"loop.steps"}
    if extended and number == 2 and _is_as_from_the_start(before, config, step):
        return f"{text}; its result is {whole}"
    rates = note_on_rates(before, config, step, reduced)
    return f"{text}; {rates}, and the result differs from {whole}" if extended else f"{text}; {rates}"


def note_on_rates(before: Config, config: Config, step: int, reduced: float) -> str:
    """Return how the learning rate continues after a step, given the factor to which "plateau" has reduced it."""
    # The evaluation after the step may have reduced the rate that "plateau" had: the step itself had a higher one.
    earlier = "" if before.schedule.name == "plateau" else f"from {_rate(before, step):.3g} "
    return (
        f"the learning rate goes {earlier}to {_rate(config, step + 1) * reduced:.3g} "
        f"({config.schedule.name} over steps {config.schedule.start + 1} to {config.loop.steps})"
    )


def describe(settings: Changes) -> str:
    """Return changed settings as text."""
    return ", ".join(f"{name} {_in_words(before)} -> {_in_words(after)}" for name, (before, after) in settings.items())


def _in_words(value: object) -> str:
    return "none" if value is None else "on" if value == {} else str(value)


def note_on_evaluations(before: Config, config: Config, step: int) -> str | None:
    """Return what a change of the evaluations means for the validation losses."""
    if (config.eval.tokens, config.eval.batches) == (before.eval.tokens, before.eval.batches) or not step:
        return None
    return (
        "validation losses are measured on other windows from now on: do not compare them with earlier ones; early "
        "stopping and plateau begin again"
    )


def _rate(config: Config, step: int) -> float:
    # Of the first step at the least: a run or a branch that has not made one begins at its rate.
    return config.optim.lr * learning_rate_factor(
        config.schedule, max(step, config.schedule.start + 1), config.loop.steps
    )


def _is_as_from_the_start(before: Config, config: Config, step: int) -> bool:
    """Return whether the steps so far would have been the same with the new ``loop.steps``."""
    if any(_rate(before, each) != _rate(config, each) for each in range(before.schedule.start + 1, step + 1)):
        return False
    # The last step of a run is evaluated in any case, which the schedule "plateau" counts.
    evaluated = step == before.loop.steps and step % (before.eval.every or step) != 0
    # So does early stopping, which a leg begins again.
    counted = (before.schedule.name == "plateau" and evaluated) or before.eval.patience is not None
    return not counted and not any(each.depends_on_steps for each in Stack.of(before.techniques).techniques)
