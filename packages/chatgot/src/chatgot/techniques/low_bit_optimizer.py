"""Low-bit optimizer: AdamW with a momentum and variance of 8 or 4 bits instead of 32."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chatgot.optim.optimizers import weights_of, with_changed_states
from chatgot.techniques.base import Machine, MemoryEffects, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import count_updates, observe_adamw
from tensorkeep.errors import UsageError
from tensorkeep.ext import format_bytes

_CLASSES = {8: "AdamW8bit", 4: "AdamW4bit", "fp8": "AdamWFp8"}
# The states that are quantised, and whether they are signed: the momentum, and the variance.
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}

# torchao quantises states of at least this many elements.
_MIN_ELEMENTS = 4096


class LowBitSettings(Section, frozen=True):
    """The precision of the states."""

    # 8, 4, or "fp8": 8 bits with an exponent.
    bits: Literal[8, 4, "fp8"] = 8
    # Whether the update is compiled into one kernel for each shape of weights, which slows down the first step. False
    # needs no compiler, and is slow.
    compiled: bool = True


class LowBitOptimizer(Technique):
    """Dettmers et al., arXiv 2110.02861, with torchao, in blocks of 256 elements (4 bits: 128) that share a scale."""

    name: ClassVar = "low-bit-optimizer"
    aliases: ClassVar = (
        "8bit",
        "8-bit-optimizer",
        "8-bit-optimizers",
        "8-bit-adam",
        "adamw8bit",
        "bitsandbytes",
        "bnb",
        "4bit",
    )
    changes: ClassVar = "optimizer"
    tolerance: ClassVar = 0.05
    summary: ClassVar = "keeps AdamW's momentum and variance in 8 or 4 bits, in blocks that share a scale"
    effect: ClassVar = (
        "AdamW's states take 2 bytes per weight (8 bits) or 1 (4 bits) instead of 8; updates take several times as long"
    )
    reference: ClassVar = "arXiv 2110.02861, arXiv 2309.01507; torchao.optim"
    predicts_memory: ClassVar = True
    settings: LowBitSettings
    conflicts: ClassVar = {
        "fused-optimizer": "the fused kernel does not take quantised states",
        **dict.fromkeys(("fsdp", "hsdp", "tensor-parallel"), "checkpoints cannot hold shards of quantised tensors"),
    }

    def missing(self, machine: Machine) -> str | None:
        lack = machine.missing_package("torchao", install="torchao")
        return lack or (machine.missing_compiler() if self.settings.compiled else None)

    def apply(self, run: StepState) -> None:
        optimizer = low_bit(run.optimizers["adamw"], bits=self.settings.bits)
        self._block_size = optimizer.block_size
        if not any(map(self._is_large, weights_of(optimizer))):
            raise UsageError(
                "low-bit-optimizer would quantise nothing: all weights of AdamW have fewer than "
                f"{_MIN_ELEMENTS:,} elements",
                remedy="leave it out, or use a larger model (--model.d_model)",
            )
        run.optimizers["adamw"] = optimizer
        # torchao compiles its step itself.
        if not self.settings.compiled:
            run.operations.update = torch.compiler.set_stance("force_eager")(run.operations.update)

    def _is_large(self, weight: Tensor) -> bool:
        # torchao keeps 32 bits for smaller states, and for sizes that are not a multiple of a block.
        return weight.numel() >= _MIN_ELEMENTS and weight.numel() % self._block_size == 0

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.state_bits = str(self.settings.bits)

    def verify(self, run: StepState) -> Verification:
        with count_updates(run) as updates, observe_adamw(run) as observed:
            yield
        optimizer = run.optimizers["adamw"]
        if not updates.count:
            return None
        # A replaced update would leave the states quantised from before.
        if not updates.optimizer_steps["adamw"]:
            raise self.not_active("the update was made without it")
        states = [(weight, optimizer.state[weight]) for weight in weights_of(optimizer)]
        plain = [weight for weight, state in states if self._is_large(weight) and not _is_quantised(state)]
        if plain:
            raise self.not_active(
                f"{type(optimizer).__name__} did not quantise the states of {len(plain)} large tensors",
                "report it, with the versions of torch and torchao",
            )
        # Quantised states alone do not show that the weights moved as they should.
        observed.check(self)
        quantised = sum(_bytes(state) for _, state in states if _is_quantised(state))
        total = sum(_bytes(state) for _, state in states)
        # Two states of 4 bytes for each weight.
        before = sum(8 * weight.numel() for weight, _ in states)
        summary = (
            f"{quantised / total:.0%} of the bytes of AdamW's states are quantised; they take {format_bytes(total)} "
            f"instead of {format_bytes(before)}"
        )
        return Proof(summary, share=quantised / total, state_bytes=total, plain_bytes=before)


def low_bit(plain: torch.optim.Optimizer, *, bits: int | str) -> Any:
    """Return torchao's AdamW for the weights and settings of torch's; its ``state_dict()`` has plain tensors only."""
    import torchao.optim

    kind = getattr(torchao.optim, _CLASSES[bits])
    supported = {"lr", "betas", "eps", "weight_decay"}
    # Drop torch's own options, such as foreach and fused; keep keys that the trainer added to the groups.
    groups = [
        {key: value for key, value in group.items() if key in supported or key not in plain.defaults}
        for group in plain.param_groups
    ]
    optimizer = kind(groups)
    optimizer.register_step_pre_hook(_rates_to_tensors)
    optimizer.register_step_post_hook(_rates_to_numbers)
    optimizer.register_state_dict_post_hook(_flatten_states)
    optimizer.register_load_state_dict_pre_hook(_unflatten_states)
    # torchao has turned the learning rates into tensors; schedules and checkpoints have numbers.
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = given["lr"]
    return optimizer


# torchao's step needs rates that are tensors. Schedules and checkpoints read numbers, so the tensors exist for the step
# only.
def _rates_to_tensors(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for group in optimizer.param_groups:
        group["rate"], group["lr"] = group["lr"], torch.tensor(group["lr"], dtype=torch.float32)


def _rates_to_numbers(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.pop("rate")


# Checkpoints hold plain tensors: each quantised tensor becomes a dict of its inner tensors.
def _flatten_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return with_changed_states(
        state, lambda index, key, value: _inner_tensors(value) if is_traceable_wrapper_subclass(value) else value
    )


def _unflatten_states(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Accept the result of `_flatten_states`, or the states of torch's AdamW, which are quantised here."""
    weights = weights_of(optimizer)

    def unflatten(index: int, key: str, value: Any) -> Any:
        if key not in _SIGNED:
            return value
        # torchao decides here, as in its step, whether the state is quantised.
        buffer = optimizer._new_buffer(weights[index], _SIGNED[key])
        if not isinstance(value, dict):
            return buffer.copy_(value)
        _, metadata = buffer.__tensor_flatten__()
        # A checkpoint may have loaded them on the CPU.
        tensors = {name: tensor.to(weights[index].device) for name, tensor in value.items()}
        return type(buffer).__tensor_unflatten__(tensors, metadata)

    return with_changed_states(state, unflatten)


def _inner_tensors(tensor: Any) -> dict[str, Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return {"": tensor}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _is_quantised(state: dict[str, Any]) -> bool:
    return all(is_traceable_wrapper_subclass(state[key]) for key in _SIGNED)


def _bytes(state: dict[str, Any]) -> int:
    return sum(each.nbytes for key in _SIGNED for each in _inner_tensors(state[key]).values())
