"""Low-bit optimizer: AdamW whose momentum and variance take 8 bits or 4 instead of 32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorkeep.errors import UsageError
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.updates import seen_updates
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_CLASSES = {8: "AdamW8bit", 4: "AdamW4bit", "fp8": "AdamWFp8"}
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The states that are quantised: the momentum, and the variance, which is never negative."""

_LEAST = 4096


class LowBitSettings(Section, frozen=True):
    """How few bits.

    Attributes
    ----------
    bits : int or str
        8, 4, or ``"fp8"``: 8 bits with an exponent.
    compiled : bool
        Whether the update is compiled into one kernel for each shape of weights, which takes a while in the first step.
        Without, it is slow, and needs no compiler.
    """

    bits: Literal[8, 4, "fp8"] = 8
    compiled: bool = True


class LowBitOptimizer(Technique):
    """Dettmers et al., arXiv 2110.02861, by torchao. Tensors of fewer than 4,096 elements keep 32 bits.

    So do those whose elements do not divide into blocks of 256, for 4 bits of 128, each of which has a scale.
    """

    name: ClassVar = "low-bit-optimizer"
    kind: ClassVar = "systems"
    changes: ClassVar = "optimizer"
    tolerance: ClassVar = 0.05
    summary: ClassVar = "keeps AdamW's momentum and variance in 8 or 4 bits, in blocks that each have a scale"
    effect: ClassVar = "AdamW's states take 2 bytes a weight, or 1, instead of 8, and steps 0 to 5% more time"
    reference: ClassVar = "arXiv 2110.02861, arXiv 2309.01507; torchao.optim"
    Settings: ClassVar = LowBitSettings
    conflicts: ClassVar = {
        "fused-optimizer": "the fused kernel takes no quantised states",
        "optimizer-offload": "what is stepped on the CPU has states of 32 bits",
        "fsdp": "its states would be parts of quantised tensors, which no checkpoint holds",
        "tensor-parallel": "its states would be parts of quantised tensors, which no checkpoint holds",
    }

    def lacks(self, machine: Machine) -> str | None:
        """Say that torchao is missing, or a compiler."""
        lack = machine.lacks_package("torchao", install="torchao")
        return lack or (machine.lacks_compiler() if self.settings.compiled else None)

    def apply(self, run: Run) -> None:
        """Put torchao's AdamW in the place of torch's.

        Raises
        ------
        UsageError
            If no state would be quantised.
        """
        optimizer = low_bit(run.optimizers["adamw"], bits=self.settings.bits)
        self._block_size = optimizer.block_size
        if not any(map(self._is_large, _weights(optimizer))):
            raise UsageError(
                f"low-bit-optimizer would quantise nothing: AdamW has no weights of {_LEAST:,} elements or more",
                remedy="leave it out, or take a larger model (--model.d_model)",
            )
        run.optimizers["adamw"] = optimizer
        if not self.settings.compiled:
            run.operations.update = torch.compiler.set_stance("force_eager")(run.operations.update)

    def _is_large(self, weight: Tensor) -> bool:
        return weight.numel() >= _LEAST and weight.numel() % self._block_size == 0

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Look at the states after the update: which are quantised, and their share of the bytes."""
        proof = Proof()
        with seen_updates(run) as updates:
            yield proof
        optimizer = run.optimizers["adamw"]
        if not updates.made:
            return
        if not updates.steps["adamw"]:
            raise self.not_active("the update was made without it", "report it, with the other techniques that are on")
        states = [(weight, optimizer.state[weight]) for weight in _weights(optimizer)]
        plain = [weight for weight, state in states if self._is_large(weight) and not _is_quantised(state)]
        if plain:
            raise self.not_active(
                f"{type(optimizer).__name__} keeps the states of {len(plain)} large tensors as they are",
                "report it, with the versions of torch and torchao",
            )
        quantised = sum(_bytes(state) for _, state in states if _is_quantised(state))
        whole = sum(_bytes(state) for _, state in states)
        before = sum(8 * weight.numel() for weight, _ in states)
        proof.is_that(
            f"{quantised / whole:.0%} of the bytes of AdamW's states are quantised; they take {format_bytes(whole)} "
            f"instead of {format_bytes(before)}",
            share=quantised / whole,
            state_bytes=whole,
            plain_bytes=before,
        )


def low_bit(plain: torch.optim.Optimizer, *, bits: int | str) -> Any:
    """Return torchao's AdamW for the weights and settings of torch's, with states that can be saved.

    In its ``state_dict()`` each quantised tensor is a dict of the plain tensors that it consists of. States of torch's
    AdamW are quantised when they are loaded.
    """
    import torchao.optim

    kind = getattr(torchao.optim, _CLASSES[bits])
    taken = {"lr", "betas", "eps", "weight_decay"}
    groups = [
        {key: value for key, value in group.items() if key in taken or key not in plain.defaults}
        for group in plain.param_groups
    ]
    optimizer, rates = kind(groups), _Rates()
    optimizer.register_step_pre_hook(rates.to_tensors)
    optimizer.register_step_post_hook(rates.to_numbers)
    optimizer.register_state_dict_post_hook(_taken_apart)
    optimizer.register_load_state_dict_pre_hook(_put_together)
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = given["lr"]
    return optimizer


class _Rates:
    """Learning rates are numbers everywhere but within torchao's step, which wants tensors."""

    def to_tensors(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._numbers = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)

    def to_numbers(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        for group, number in zip(optimizer.param_groups, self._numbers, strict=True):
            group["lr"] = number


def _taken_apart(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "state": {
            index: {
                key: _parts(value) if is_traceable_wrapper_subclass(value) else value for key, value in each.items()
            }
            for index, each in state["state"].items()
        },
    }


def _parts(tensor: Any) -> dict[str, Tensor]:
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _put_together(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    weights = _weights(optimizer)
    return {
        **state,
        "state": {
            index: {key: _whole(optimizer, weights[index], key, value) for key, value in each.items()}
            for index, each in state["state"].items()
        },
    }


def _whole(optimizer: Any, weight: Tensor, key: str, value: Any) -> Any:
    if key not in _SIGNED:
        return value
    # Decides by itself, as in its step, whether it is quantised.
    whole = optimizer._new_buffer(weight, _SIGNED[key])
    if isinstance(value, dict):
        _, others = whole.__tensor_flatten__()
        parts = {name: part.to(weight.device) for name, part in value.items()}
        return type(whole).__tensor_unflatten__(parts, others)
    return whole.copy_(value)


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _is_quantised(state: dict[str, Any]) -> bool:
    return all(is_traceable_wrapper_subclass(state[key]) for key in _SIGNED)


def _bytes(state: dict[str, Any]) -> int:
    values = (state[key] for key in _SIGNED)
    return sum(
        sum(part.nbytes for part in _parts(value).values()) if is_traceable_wrapper_subclass(value) else value.nbytes
        for value in values
    )
