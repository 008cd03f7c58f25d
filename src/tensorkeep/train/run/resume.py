"""What may change when a run resumes, and what that means for its results."""

from collections.abc import Iterator

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import TECHNIQUES, Config, differences
from tensorkeep.train.optim.schedules import learning_rate_factor
from tensorkeep.train.run.folder import Changes, RunFolder, RunRecord
from tensorkeep.train.techniques.parallel import TOGETHER
from tensorkeep.train.techniques.stack import Stack

_KEPT = ("log.", "eval.", "sample.", "checkpoint.", "loop.steps", "loop.on_divergence")
"""Prefixes of the settings that a resumed run may change, and that later resumes keep. They do not affect the weights
of a step, with exceptions that `_refusal` checks."""

_OF_ONE_RESUME = ("loop.device", "loop.threads", "data.source", *(f"{TECHNIQUES}{name}" for name in TOGETHER))
"""Prefixes of the settings that depend on where a run is resumed; they affect rounding only."""


def current_config(record: RunRecord) -> Config:
    """Return the configuration of a run's start with the changes of its last resume that are kept."""
    changes = record.resumed[-1].settings if record.resumed else {}
    return record.config.changed({name: now for name, (_, now) in changes.items() if name.startswith(_KEPT)})


def changed_settings(record: RunRecord, config: Config, folder: RunFolder) -> Changes:
    """Return the settings that differ from a run's start; UsageError if one of them decides what the run computes."""
    current = current_config(record)
    refused = [
        f"{name}: {before!r} then, {now!r} now{reason}"
        for name, (before, now) in differences(current, config).items()
        if (reason := _refusal(name, current, config)) is not None
    ]
    if refused:
        raise UsageError(
            f"was started with another configuration: {'; '.join(refused)}",
            path=folder.path,
            remedy="leave these settings out to resume with those of the run, or start a new run in another --out",
        )
    return differences(record.config, config)


def _refusal(name: str, current: Config, config: Config) -> str | None:
    """Return why a setting must not change, as a remark that may be empty; None if it may."""
    if not name.startswith((*_KEPT, *_OF_ONE_RESUME)):
        return ""
    if name == "loop.steps" and config.loop.steps < current.loop.steps:
        return " (a run may become longer, not shorter)"
    if name == "loop.steps" and current.schedule.name == "range":
        return " (the learning rates of a range test depend on it)"
    if name in ("eval.every", "eval.tokens", "eval.batches") and current.schedule.name == "plateau":
        return " (the schedule 'plateau' depends on the evaluations)"
    return None


def notes_on_changes(current: Config, config: Config, step: int) -> Iterator[str]:
    """Yield what the changes of a resume after a step mean for the results of the run."""
    if config.loop.steps != current.loop.steps:
        yield _on_length(current, config, step)
    if (config.eval.tokens, config.eval.batches) != (current.eval.tokens, current.eval.batches) and step:
        yield "validation losses are measured on other windows from now on: do not compare them with earlier ones"


def _on_length(current: Config, config: Config, step: int) -> str:
    """Return how a run that was made longer relates to one that had this length from its start."""
    before, steps, schedule = current.loop.steps, config.loop.steps, current.schedule
    text = f"the run now has {steps} steps instead of {before}"
    rates = [[learning_rate_factor(schedule, each, end) for end in (before, steps)] for each in range(1, step + 1)]
    if not step or (all(was == would_be for was, would_be in rates) and not _depends_on_steps(current, step)):
        return f"{text}; its result is that of a run of {steps} steps from the start"
    now = learning_rate_factor(schedule, step + 1, steps)
    return (
        f"{text}; from step {step + 1} on its schedule ({schedule.name}) is that of {steps} steps: the learning rate "
        f"goes from {rates[-1][0]:.2f} to {now:.2f} of its peak, and the result differs from that of a run of {steps} "
        "steps from the start"
    )


def _depends_on_steps(config: Config, step: int) -> bool:
    """Return whether the steps so far would have differed with another ``loop.steps``, apart from learning rates."""
    # The last step of a run is evaluated in any case, which the schedule "plateau" counts.
    evaluated = step == config.loop.steps and step % (config.eval.every or step) != 0
    plateau = config.schedule.name == "plateau" and evaluated
    return plateau or any(each.depends_on_steps for each in Stack.of(config.techniques).techniques)
