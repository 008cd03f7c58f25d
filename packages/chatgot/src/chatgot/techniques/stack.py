"""The techniques of a run: found by name, checked, ordered, applied, verified and saved; the defaults of a recipe."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, permutations
from typing import Any, get_args, get_origin

import msgspec

from chatgot.config.config import TECHNIQUES, Config
from chatgot.settings import read_settings
from chatgot.step.device import chosen_device
from chatgot.step.state import checked_at_once
from chatgot.step.world import World
from chatgot.techniques.base import TECHNIQUE_CLASSES, Changed, Machine, MemoryEffects, Proof, StepState, Technique
from chatgot.techniques.observe import plain_rows_computed
from tensorkeep.errors import MissingExtraError, UnsupportedError, UsageError

# A for speed, B for memory with long contexts, C for memory alone.
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "A": ("compile", "gradient-accumulation", "mixed-precision"),
    "B": ("attention-kernel", "activation-checkpointing", "low-bit-optimizer"),
    "C": ("activation-checkpointing", "low-bit-optimizer"),
}
# A technique must be proved within this many steps. More than `MOST_SKIPPED`: a run that skips updates ends first.
_MOST_OBSERVED = 40


def expanded(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(COMBINATIONS.get(name, (name,)) for name in names)))


class Stack:
    def __init__(self, techniques: Sequence[Technique] = ()) -> None:
        self.techniques = _in_order(techniques)
        # Both ways, because only one technique of a pair declares the conflict.
        for first, second in permutations(self.techniques, 2):
            if second.name in first.conflicts:
                raise UsageError(
                    f"{first.name} and {second.name} cannot be combined: {first.conflicts[second.name]}",
                    remedy=f"leave {first.name} or {second.name} out",
                )
        self.proofs: dict[str, Proof] = {}
        self._observed = 0

    @classmethod
    def of(cls, settings: Mapping[str, Mapping[str, Any]]) -> "Stack":
        return cls([_build(name, given) for name, given in settings.items()])

    def check(self, machine: Machine) -> None:
        """Raise MissingExtraError if only packages are missing on the machine, UnsupportedError if more is missing."""
        missing = {each.name: text for each in self.techniques if (text := each.missing(machine)) is not None}
        if missing:
            # Installing packages helps only if nothing else is missing.
            kind = MissingExtraError if all("pip install" in text for text in missing.values()) else UnsupportedError
            off = " ".join(f"--{TECHNIQUES}{name} off" for name in missing)
            raise kind(
                "; ".join(f"{name} {text}" for name, text in missing.items()),
                remedy=f"leave {' and '.join(missing)} out ({off}), or use a machine that has what is missing",
            )

    def configure(self, config: Config) -> Config:
        for each in self.techniques:
            if config.data.mask_documents and each.refuses_document_masks is not None:
                raise UsageError(
                    f"data.mask_documents is true, and {each.name} is on: {each.refuses_document_masks}",
                    remedy=f"leave {each.name} out, or set data.mask_documents to false",
                )
            # Each technique sees the configuration of the earlier ones.
            config = each.configure(config)
        return config

    def memory_effects(self) -> MemoryEffects:
        effects = MemoryEffects()
        for each in self.techniques:
            each.affect_memory(effects)
        return effects

    @contextmanager
    def process(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for each in self.techniques:
                contexts.enter_context(each.process())
            yield

    def apply(self, run: StepState) -> None:
        for each in self.techniques:
            each.apply(run)

    def warm_up(self, run: StepState) -> None:
        for each in self.techniques:
            each.warm_up(run)

    @contextmanager
    def verified(self, run: StepState) -> Iterator[None]:
        """Observe the step in this context with every technique that has no proof yet, and keep the proofs.

        Raises TechniqueNotActiveError if a technique was not active, or could not be proved in 40 steps.
        """
        unproved = [each for each in self.techniques if each.name not in self.proofs]
        if not unproved:
            yield
            return
        if not self._observed:
            # Before any hook is installed, because compiled code would contain it.
            self.warm_up(run)
        # Most techniques are proved in the first step; some need a step that updates the weights.
        self._observed += 1
        found: dict[str, Proof] = {}
        with ExitStack() as contexts:
            contexts.enter_context(checked_at_once(run))
            contexts.enter_context(plain_rows_computed(run))
            for each in unproved:
                contexts.enter_context(_observed(each, run, found))
            yield
        self.proofs.update((each.name, found[each.name]) for each in unproved if each.name in found)
        missing = [each for each in unproved if each.name not in found]
        if missing and self._observed >= _MOST_OBSERVED:
            raise missing[0].not_active(
                f"{self._observed} steps did not show it", "find out why updates are skipped, or leave it out"
            )

    def state_dict(self) -> dict[str, Any]:
        states = {each.name: each.state_dict() for each in self.techniques}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for each in self.techniques:
            if each.name in states:
                each.load_state_dict(states[each.name])


@contextmanager
def _observed(technique: Technique, run: StepState, proofs: dict[str, Proof]) -> Iterator[None]:
    proof = yield from technique.verify(run)
    if proof is not None:
        proofs[technique.name] = proof


def _build(name: str, given: Mapping[str, Any]) -> Technique:
    technique = TECHNIQUE_CLASSES.get(name)
    known = {field.name: get_origin(field.type) for field in msgspec.structs.fields(technique.Settings)}
    unknown = [setting for setting in given if setting not in known]
    if unknown:
        raise UsageError(f"{name} has no setting {unknown[0]!r}", remedy=f"its settings: {', '.join(known) or 'none'}")
    # A text such as "16,32,64" is a list where a setting takes several values.
    settings = {
        setting: value.split(",") if known[setting] is tuple and isinstance(value, str) else value
        for setting, value in given.items()
    }
    try:
        return technique(read_settings(settings, technique.Settings))
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", remedy=error.remedy) from error


def _in_order(techniques: Sequence[Technique]) -> list[Technique]:
    # The order of entry points depends on the installer, so the order is declared.
    order = get_args(Changed)
    waiting = sorted(techniques, key=lambda each: (order.index(each.changes), each.name))
    ordered: list[Technique] = []
    # A topological sort; ties keep the order of changes and names, so that every run applies the same order.
    while waiting:
        names = {each.name for each in waiting}
        ready = next((each for each in waiting if not names & set(each.after) - {each.name}), None)
        if ready is None:
            raise UsageError(f"{', '.join(sorted(names))} must each come after another", remedy="leave one out")
        waiting.remove(ready)
        ordered.append(ready)
    return ordered


def turn_on_defaults(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """Return a configuration with its default techniques turned on, and why the others are off."""
    # One after the other, because a default may conflict with an earlier default.
    off: list[str] = []
    # The result has no defaults left: a run records what was on, and resumes with it.
    defaults, config = config.default_techniques, msgspec.structs.replace(config, default_techniques={})
    for name, settings in defaults.items():
        try:
            # Checked alone first, because `configure` below may measure, which takes time.
            Stack.of({name: settings}).check(machine)
            turned_on = msgspec.structs.replace(config, techniques={**config.techniques, name: dict(settings)})
            config = Stack.of(turned_on.techniques).configure(turned_on)
        # Off if it cannot run here, or conflicts with a technique that was requested by name.
        except (UsageError, UnsupportedError) as error:
            off.append(error.message if error.message.startswith(name) else f"{name}: {error.message}")
    return config, off


def agreed_defaults(config: Config, world: World) -> tuple[Config, str | None]:
    """Turn on the defaults, with a line about those that are off; a collective."""
    if not config.default_techniques:
        return config, None
    device = chosen_device(config.loop.device)
    # Only rank 0 measures: ranks with other choices would not train the same model.
    config, off = turn_on_defaults(config, Machine(device)) if world.is_main else (config, [])
    values, off = world.broadcast((config.as_dict(), off))
    note = f"off on {device.type}: {'; '.join(off)}" if off else None
    return Config.from_dict(values), note
