"""The memory ledger: predicted bytes of parameters, gradients, states, activations, logits.

Every figure is computed from shapes. The peak is either at the start of the backward pass, when all activations exist,
or in the step of the optimizers, when all gradients exist.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from tensorkeep.train.config.config import Config
from tensorkeep.train.memory.activations import FLOAT, Activations
from tensorkeep.train.memory.evaluation import evaluation_bytes, evaluation_rows
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.optim.muon import dtype_of_steps, update_bytes
from tensorkeep.train.optim.optimizers import fused_projections
from tensorkeep.train.techniques.low_bit_optimizer import LowBitSettings
from tensorkeep.train.techniques.stack import Stack

_ADAMW = 2 * FLOAT
_MUON = FLOAT
_QUANTISED_FROM = 4096
_LOW_BITS: dict[str, tuple[float, int, int]] = {"8": (1.0, 256, 256), "4": (0.5, 128, 16), "fp8": (1.0, 256, 0)}
"""Of torchao's optimizers: bytes of an element, elements that share a scale, entries of the lookup table."""

_KNOWN = (
    *("mixed-precision", "activation-checkpointing", "gradient-accumulation", "fused-optimizer", "low-bit-optimizer"),
    *("optimizer-offload", "activation-swapping", "fused-cross-entropy", "activation-function", "cpu-threads", "tf32"),
    *("lr-range-test", "lr-plateau", "length-curriculum", "progressive-length"),
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of training in bytes, by purpose."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    """That of ``ema``."""
    copies: int
    """16-bit copies of weights, if matmuls are computed in 16 bits."""
    activations: int
    """Kept for the backward pass, without the logits."""
    recomputed: int
    """What exists in addition while activation checkpointing recomputes a block."""
    logits: int
    """At the start of the backward pass: their log-softmax, and the gradient twice."""
    update: int
    """Temporary memory of an optimizer step."""
    evaluation: int
    """Temporary memory of an evaluation between two steps."""
    accumulated: bool
    """Whether gradients exist from one micro-batch to the next."""
    unknown: tuple[str, ...] = ()
    """Techniques that are on and whose effect on memory is not predicted."""

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at once, evaluations included."""
        return max(self.peak_of_steps, self.parameters + self.optimizer + 2 * self.average + self.evaluation)

    @property
    def peak_of_steps(self) -> int:
        """The largest number of bytes in use at once in a training step."""
        always = self.parameters + self.optimizer + self.average
        backward = self.copies + self.activations + max(self.logits, self.recomputed)
        return always + max(backward + self.gradients * self.accumulated, self.gradients + self.update)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, and both peaks."""
        return {**asdict(self), "unknown": list(self.unknown), "peak_of_steps": self.peak_of_steps, "peak": self.peak}


def predict(config: Config, *, device: str) -> Ledger:
    """Return the ledger of a run on ``"cpu"`` or ``"cuda"``, whose kernels keep different activations.

    ``config.model.vocab_size`` must be that of the data.

    Raises UsageError, UnsupportedError if a technique does not exist, or techniques cannot be combined.

    Examples
    --------
    >>> from tensorkeep.train.config.recipes import get_recipe
    >>> ledger = predict(get_recipe("shakespeare-char-cpu").changed({"model.vocab_size": 65}), device="cpu")
    >>> ledger.parameters, ledger.optimizer == 2 * ledger.parameters
    (3216384, True)
    """
    for each in Stack.of(config.techniques).techniques:
        if each.kind == "algorithmic":  # these may change the model
            config = each.configure(config)
    model = GPT(config.model, device="meta")
    nbytes = FLOAT * sum(each.numel() for each in model.parameters())
    on = config.techniques
    parts = int(on.get("gradient-accumulation", {}).get("batches", 2)) if "gradient-accumulation" in on else 1
    rows = -(-config.loop.batch_size // parts)
    activations = Activations(config.model, rows=rows, on_cuda=device == "cuda", techniques=on)
    # The 16-bit copies of all weights of matmuls are made for each micro-batch; a tied weight counts once.
    linear = {id(each.weight): 2 * each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear)}
    return Ledger(
        parameters=nbytes,
        gradients=FLOAT * sum(each.numel() for each in model.parameters() if each.requires_grad),
        optimizer=sum(_states(config, model, device)),
        average=nbytes if config.ema.decay else 0,
        copies=sum(linear.values()) if activations.width < FLOAT else 0,
        activations=activations.kept(),
        recomputed=activations.recomputed(),
        logits=activations.logits(),
        update=_update(config, model, device),
        evaluation=evaluation_bytes(config.model, evaluation_rows(activations), width=activations.width),
        accumulated=config.loop.accumulate * parts > 1,
        unknown=tuple(name for name in on if name not in _KNOWN),
    )


def _states(config: Config, model: GPT, device: str) -> Iterator[int]:
    """Yield the bytes on the device of the optimizer state of each parameter."""
    offloaded = device == "cuda" and "optimizer-offload" in config.techniques
    for name, each in _trained(model).items():
        if _updated_by_muon(config, name, each):
            yield _MUON * each.numel() + (FLOAT * each.shape[0] if config.optim.muon_beta2 else 0)
        elif not offloaded:
            yield _adamw(config, each.numel())


def _trained(model: GPT) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _updated_by_muon(config: Config, name: str, parameter: Tensor) -> bool:
    return config.optim.name == "muon" and name.startswith("blocks.") and parameter.ndim == 2


def _adamw(config: Config, count: int) -> int:
    if "low-bit-optimizer" not in config.techniques:
        return _ADAMW * count
    bits = config.techniques["low-bit-optimizer"].get("bits", LowBitSettings().bits)
    element, shared, table = _LOW_BITS[str(bits)]
    if count < _QUANTISED_FROM or count % shared:
        return _ADAMW * count
    return round(2 * (element * count + FLOAT * (count / shared + table)))


def _update(config: Config, model: GPT, device: str) -> int:
    """Return the temporary memory of the updates by AdamW and, after them, by Muon."""
    parameters = _trained(model)
    muons: list[Tensor] = []
    for name, each in parameters.items():
        if _updated_by_muon(config, name, each):
            muons += each.chunk(fused_projections(name)) if config.optim.muon_split else [each]
    rest = [each.numel() for name, each in parameters.items() if not _updated_by_muon(config, name, each)]
    # AdamW updates all weights at once on CUDA, and needs no memory if the kernel is fused.
    together = device == "cuda" and not {"low-bit-optimizer", "optimizer-offload"} & set(config.techniques)
    adamw = FLOAT * (sum(rest) if together or config.optim.implementation == "foreach" else max(rest))
    if config.optim.implementation == "fused" or "fused-optimizer" in config.techniques:
        adamw = 0
    return max(adamw, update_bytes(muons, dtype_of_steps(device)))
