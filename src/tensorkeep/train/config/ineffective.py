"""Settings of a run that cannot take effect, each reported with the numbers that prevent it."""

from collections.abc import Iterator

import msgspec

from tensorkeep.train.config.config import Config, flat
from tensorkeep.train.optim.schedules import learning_rate_factor

_DECAYING = ("cosine", "linear", "wsd")


def ineffective_settings(config: Config) -> list[str]:
    """Return a note for each setting that has no effect in a run, or not the one that it states.

    A setting counts if it differs from the default of its section.

    Examples
    --------
    >>> from tensorkeep.train.config.recipes import get_recipe
    >>> ineffective_settings(get_recipe("shakespeare-char-cpu").changed({"sample.prompt": "To be"}))
    ['sample.prompt has no effect: sample.every is 0: no sample is generated']
    """
    return [*_warm_up(config), *_evaluations(config), *_without(config)]


def _warm_up(config: Config) -> Iterator[str]:
    warmup, steps = config.schedule.warmup_steps, config.loop.steps - config.schedule.start
    decays = config.schedule.name in _DECAYING
    if warmup > steps or (decays and warmup == steps and config.schedule.final < 1):
        reached = learning_rate_factor(config.schedule, config.loop.steps, config.loop.steps)
        decay = ", and does not decay" if decays and warmup == steps else ""
        yield (
            f"schedule.warmup_steps is {warmup:,}, and the schedule has {steps:,} steps: the learning rate ends at "
            f"{reached:.0%} of its peak{decay}; for a shorter warm-up: --schedule.warmup_steps {steps // 10}"
        )


def _evaluations(config: Config) -> Iterator[str]:
    """Yield what needs more evaluations before the last step than there are."""
    every, steps = config.eval.every, config.loop.steps
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
    """Yield the settings that need another setting, which the run does not have."""
    schedule, sample, steps = config.schedule, config.sample, config.loop.steps
    needs: dict[tuple[str, ...], tuple[bool, str]] = {
        ("schedule.decay",): (schedule.name == "wsd", f"schedule.name is {schedule.name!r}, not 'wsd'"),
        ("schedule.patience", "schedule.factor"): (
            schedule.name == "plateau",
            f"schedule.name is {schedule.name!r}, not 'plateau'",
        ),
        ("schedule.final",): (
            schedule.name not in ("constant", "plateau"),
            f"schedule.name is {schedule.name!r}, which has no last rate",
        ),
        ("eval.tokens",): (config.eval.batches is None, f"eval.batches is {config.eval.batches}, which decides"),
        **{
            (f"{name}.every",): (getattr(config, name).every <= steps, f"the run has {steps:,} steps")
            for name in ("checkpoint", "eval", "log", "sample")
        },
        ("sample.top_k",): (sample.temperature > 0, "sample.temperature is 0: the likeliest token is taken"),
        tuple(f"sample.{name}" for name in ("prompt", "tokens", "temperature", "top_k")): (
            0 < sample.every <= steps,
            f"sample.every is {sample.every:,}: no sample is generated",
        ),
        ("checkpoint.keep_best",): (
            config.eval.every > 0 or not config.checkpoint.keep_best,
            "eval.every is 0: no step is known to be the best before the last one",
        ),
        tuple(f"optim.muon_{name}" for name in ("lr", "momentum", "steps", "polynomials", "beta2", "split")): (
            config.optim.name == "muon",
            f"optim.name is {config.optim.name!r}, not 'muon'",
        ),
        ("model.rope_base",): (config.model.positions == "rotary", "model.positions is 'learned'"),
    }
    values, defaults = flat(config.as_dict()), _defaults(config)
    for names, (met, reason) in needs.items():
        changed = [name for name in names if values[name] != defaults[name]]
        if changed and not met:
            yield f"{' and '.join(changed)} {'have' if changed[1:] else 'has'} no effect: {reason}"


def _defaults(config: Config) -> dict[str, object]:
    return {
        f"{section.name}.{field.name}": field.default
        for section in msgspec.structs.fields(config)
        if isinstance(getattr(config, section.name), msgspec.Struct)
        for field in msgspec.structs.fields(getattr(config, section.name))
    }
