"""LoRA: only adapters of low rank are trained; the weights of the model stay as they are."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec
from torch import Tensor

from chatgot.model.layers import ADAPTER_B, is_adapter
from chatgot.optim.optimizers import weights_of
from chatgot.settings import Count, Positive
from chatgot.techniques.base import Config, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import count_updates, fingerprint


class LoraSettings(Section, frozen=True):
    """The size of the adapters, and which layers have an adapter."""

    # The rank of the adapters.
    rank: Count = 8
    # The output of the adapters is multiplied by alpha / rank.
    alpha: Positive = 16.0
    # The layers that have an adapter: "attention", "mlp", or "all".
    targets: Literal["all", "attention", "mlp"] = "all"


class Lora(Technique):
    """Hu et al., arXiv 2106.09685; the frozen weights come from ``--init-from``."""

    name: ClassVar = "lora"
    aliases: ClassVar = ("adapters", "peft")
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "trains adapters of low rank beside the layers of the blocks, and nothing else"
    effect: ClassVar = (
        "gradients and optimizer states of a few per cent of the weights; for fine-tuning (--init-from), not for "
        "training from random weights"
    )
    reference: ClassVar = "arXiv 2106.09685"
    settings: LoraSettings
    conflicts: ClassVar = {
        "quantised-forward": "it replaces the layers of the blocks, which have the adapters",
        **dict.fromkeys(
            ("fsdp", "hsdp", "tensor-parallel", "pipeline-parallel"),
            "it shards the weights of the model, and frozen ones beside trained ones are not supported",
        ),
    }

    def configure(self, config: Config) -> Config:
        settings = msgspec.structs.asdict(self.settings)
        return config.changed({f"model.lora.{name}": value for name, value in settings.items()})

    def verify(self, run: StepState) -> Verification:
        parameters = dict(run.model.named_parameters())
        frozen = {name: each for name, each in parameters.items() if not is_adapter(name)}
        # The first update moves only B: the gradient of A is a product with B, which is 0.
        adapters = {name: each for name, each in parameters.items() if name.endswith(ADAPTER_B)}
        with count_updates(run) as updates:
            before = _fingerprints(parameters)
            yield
        if not updates.count:
            return None
        after = _fingerprints(parameters)
        # Bits, not values: a frozen weight must not change at all.
        moved = [name for name in frozen if after[name] != before[name]]
        still = [name for name in adapters if after[name] == before[name]]
        if moved or still or not adapters:
            raise self.not_active(
                f"{len(moved)} of {len(frozen)} frozen weights were changed, and {len(still)} of {len(adapters)} "
                "adapters were not"
            )
        trained = sum(each.numel() for optimizer in run.optimizers.values() for each in weights_of(optimizer))
        total = sum(each.numel() for each in parameters.values())
        summary = (
            f"{len(adapters)} adapters of rank {self.settings.rank} were trained, {trained / total:.2%} of "
            f"{total:,} weights; {len(frozen)} frozen tensors kept every bit"
        )
        return Proof(summary, adapters=len(adapters), trained=trained, parameters=total)


def _fingerprints(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: fingerprint(each.detach()) for name, each in parameters.items()}
