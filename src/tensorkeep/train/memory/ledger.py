"""The memory ledger: what parameters, gradients, optimizer states, activations and logits will take.

Every figure follows from shapes. The most is needed where the backward pass begins, and all activations are there, or
where the optimizers are stepped, and all gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from tensorkeep.train.config.config import Config
from tensorkeep.train.evaluate import evaluation_batch_size
from tensorkeep.train.memory.activations import Activations, Shape
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.optim.muon import update_bytes
from tensorkeep.train.techniques.low_bit_optimizer import LowBitSettings
from tensorkeep.train.techniques.stack import Stack

FLOAT = 4
_ADAMW = 2 * FLOAT
_MUON = FLOAT
_QUANTISED_FROM = 4096
_LOW_BITS: dict[str, tuple[float, int, int]] = {"8": (1.0, 256, 256), "4": (0.5, 128, 16), "fp8": (1.0, 256, 0)}
"""Of torchao's optimizers: bytes of an element, elements that share a scale, entries of the table of values."""

_KNOWN = (
    *("mixed-precision", "activation-checkpointing", "gradient-accumulation", "fused-optimizer", "low-bit-optimizer"),
    *("optimizer-offload", "activation-swapping", "fused-cross-entropy", "activation-function", "cpu-threads", "tf32"),
    *("lr-range-test", "lr-plateau", "length-curriculum", "progressive-length"),
)
_OFFLOADED_AT_ONCE = 2
"""Of the activations, those of so many blocks are on a GPU whose activations are swapped."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes that training takes, by what they are for.

    Attributes
    ----------
    parameters, gradients, optimizer, average : int
        The average is that of ``ema``.
    copies : int
        Of weights in 16 bits, where products are computed so.
    activations : int
        That are kept for the backward pass, without the logits.
    recomputed : int
        That are there once more while a block is computed again.
    logits : int
        Where the backward pass begins: their logarithms, and their gradient twice.
    update : int
        What a step of the optimizers takes beside their states.
    evaluation : int
        What an evaluation between two steps takes for a while.
    accumulated : bool
        Whether gradients are there from one batch to the next.
    unknown : tuple of str
        Techniques that are on, and whose effect on memory is not predicted.
    """

    parameters: int
    gradients: int
    optimizer: int
    average: int
    copies: int
    activations: int
    recomputed: int
    logits: int
    update: int
    evaluation: int
    accumulated: bool
    unknown: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes that are in use at one moment, evaluations included."""
        return max(self.peak_of_steps, self.parameters + self.optimizer + 2 * self.average + self.evaluation)

    @property
    def peak_of_steps(self) -> int:
        """The most bytes that are in use at one moment of a step."""
        always = self.parameters + self.optimizer + self.average
        backward = self.copies + self.activations + max(self.logits, self.recomputed)
        return always + max(backward + self.gradients * self.accumulated, self.gradients + self.update)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, with the peak."""
        return {**asdict(self), "unknown": list(self.unknown), "peak_of_steps": self.peak_of_steps, "peak": self.peak}


def predict(config: Config, *, device: str) -> Ledger:
    """Return the ledger of a run.

    Parameters
    ----------
    config : Config
        With its techniques; ``model.vocab_size`` is that of the data.
    device : str
        ``"cpu"`` or ``"cuda"``: they keep different things of dropout.

    Raises
    ------
    UsageError, UnsupportedError
        If the techniques are none, or cannot be combined.
    """
    config = _with_its_model(config)
    model = GPT(config.model, device="meta")
    nbytes = FLOAT * sum(each.numel() for each in model.parameters())
    on = config.techniques
    parts = int(on.get("gradient-accumulation", {}).get("batches", 2)) if "gradient-accumulation" in on else 1
    shape = Shape(config.model, rows=-(-config.loop.batch_size // parts), on_cuda=device == "cuda", techniques=on)
    found = Activations(shape)
    kept = found.kept()
    if "activation-swapping" in on:
        kept = min(kept, _OFFLOADED_AT_ONCE * found.block())
    return Ledger(
        parameters=nbytes,
        gradients=nbytes,
        optimizer=sum(_states(config, model, device)),
        average=nbytes if config.ema.decay else 0,
        copies=_copies(model) if shape.width < FLOAT else 0,
        activations=kept,
        recomputed=found.recomputed(),
        logits=found.logits(),
        update=_update(config, model, device),
        evaluation=_evaluation(config.model),
        accumulated=config.loop.accumulate * parts > 1,
        unknown=tuple(name for name in on if name not in _KNOWN),
    )


def _evaluation(model: ModelConfig) -> int:
    """Return the most that is there at once of a forward pass in float32 that keeps nothing: in an MLP, or at its end.

    There are the stream before and after the attention, its norm, what the activation is computed from and what it
    gives, with a factor between them or the result of the MLP; in the end the logits and their logarithms.
    """
    streams, hidden = (3, 3) if model.gated or model.activation == "relu2" else (4, 2)
    floats = max(streams * model.d_model + hidden * model.mlp_width, 2 * model.vocab_size)
    return FLOAT * evaluation_batch_size(model) * model.context_length * floats


def _with_its_model(config: Config) -> Config:
    """Return a configuration after those of its techniques that change the model have done so."""
    for each in Stack.of(config.techniques).techniques:
        if each.kind == "algorithmic":
            config = each.configure(config)
    return config


def _copies(model: GPT) -> int:
    """Return the bytes of 16-bit copies of all weights that enter products, made once for each batch."""
    linear = {id(each.weight): each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear)}
    return 2 * sum(linear.values())


def _states(config: Config, model: GPT, device: str) -> Iterator[int]:
    """Yield the bytes of the optimizers' states of each parameter, on the device."""
    offloaded = device == "cuda" and "optimizer-offload" in config.techniques
    for name, each in model.named_parameters():
        if _is_muons(config, name, each):
            yield _MUON * each.numel()
        elif not offloaded:
            yield _adamw(config, each.numel())


def _is_muons(config: Config, name: str, parameter: Tensor) -> bool:
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
    """Return what the updates take for a while: those of AdamW, and then those of Muon."""
    parameters = dict(model.named_parameters())
    muons = [each for name, each in parameters.items() if _is_muons(config, name, each)]
    rest = [each.numel() for name, each in parameters.items() if not _is_muons(config, name, each)]
    return max(_adamw_update(config, rest, device), update_bytes(muons))


def _adamw_update(config: Config, sizes: list[int], device: str) -> int:
    """Return what an update by AdamW takes: on CUDA of all weights at once, unless one kernel makes it."""
    if config.optim.implementation == "fused" or "fused-optimizer" in config.techniques:
        return 0
    together = device == "cuda" and not {"low-bit-optimizer", "optimizer-offload"} & set(config.techniques)
    return FLOAT * (sum(sizes) if together or config.optim.implementation == "foreach" else max(sizes))
