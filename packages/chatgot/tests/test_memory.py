"""The ledger against measured memory: states byte for byte, activations within a tenth."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from chatgot.config.config import Config
from chatgot.memory import Ledger, activations_of, evaluation_bytes, evaluation_rows, predict
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.optim.optimizers import build_optimizers
from chatgot.step.train_step import evaluate
from chatgot.techniques.attention_kernel import matmul_attention
from chatgot.techniques.base import MemoryEffects
from chatgot.techniques.stack import Stack

CONFIG = Config(
    recipe="ledger", model=ModelConfig(vocab_size=65, context_length=64, n_layers=2, n_heads=4, d_model=64)
).changed({"loop.batch_size": 4})

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "rotary": {"positions": "rotary"},
    **{f"token_shift {each}": {"token_shift": each} for each in (True, "blocks")},
    "convolution": {"positions": "rotary", "convolution": 3},
    **{each: {"activation": each} for each in ("swiglu", "relu2")},
    "llama": {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tied": False},
    "biases": {"bias": True, "activation": "geglu"},
    "vocabulary": {"vocab_size": 2000},
    "grouped": {"kv_heads": 2},
    "grouped, rotary": {"kv_heads": 1, "positions": "rotary"},
    "norms of heads": {"qk_norm": True},
    "norms of heads, grouped, rotary": {"qk_norm": True, "positions": "rotary", "kv_heads": 1},
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "mixed-precision": {"mixed-precision": {"dtype": "bf16"}},
    "matmul": {"attention-kernel": {"kernel": "matmul"}},
    "checkpointing": {"activation-checkpointing": {}},
    "every second": {"activation-checkpointing": {"every": 2}},
}


@contextmanager
def counted_activations(model: torch.nn.Module) -> Iterator[list[int]]:
    """Record the bytes of what autograd keeps within the block, without parameters; each storage once."""
    seen = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    sizes: list[int] = []
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
            # As long as it is alive, no other storage gets its address.
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def with_model(**changes: Any) -> Config:
    return msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, **changes))


def kept(config: Config, techniques: dict[str, Any]) -> int:
    """Count the bytes that autograd keeps of one batch."""
    torch.manual_seed(0)
    model = GPT(config.model)
    if "activation-checkpointing" in techniques:
        every = techniques["activation-checkpointing"].get("every", 1)
        for block in list(model.blocks)[::every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if "attention-kernel" in techniques:
        for attention in model.attentions:
            attention.kernel = matmul_attention
    tokens = torch.randint(config.model.vocab_size, (2, config.loop.batch_size, config.model.context_length))
    mixed = "mixed-precision" in techniques
    with counted_activations(model) as sizes, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        model.loss(tokens[0], tokens[1])
    return sum(sizes)


# Every model with what changes the size of all activations; other techniques with the models that they treat in a way
# of their own, and with some of the others.
SAMPLE = {
    *itertools.product(MODELS, ("nothing", "mixed-precision")),
    *itertools.product(("grouped, rotary", "norms of heads", "llama"), ("matmul", "checkpointing")),
    *itertools.product(("dropout", "shifts"), ("checkpointing", "every second")),
}
# The kernel has no dropout.
CASES = [case for case in itertools.product(MODELS, TECHNIQUES) if case != ("dropout", "matmul")]


@pytest.mark.parametrize(
    ("model", "techniques"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.exhaustive) for case in CASES],
)
def test_activations_are_predicted_within_a_tenth(model: str, techniques: str) -> None:
    on = TECHNIQUES[techniques]
    config = with_model(**MODELS[model])
    found = activations_of(
        config.model, rows=config.loop.batch_size, on_cuda=False, effects=Stack.of(on).memory_effects()
    )
    config = config.changed({f"techniques.{name}": settings for name, settings in on.items()})
    # The loss keeps the logits and the targets.
    loss = (4 * config.model.vocab_size + 8) * config.loop.batch_size * config.model.context_length
    predicted = found.kept + loss + predict(config, device="cpu").copies
    assert predicted == pytest.approx(kept(config, on), rel=0.1)


def test_unpredicted_activations_are_counted() -> None:
    """A tensor that is kept and not predicted is counted: the tests above can fail."""
    model = GPT(CONFIG.model)
    tokens = torch.randint(65, (2, 8, 64))
    with counted_activations(model) as sizes:
        plain = model.loss(tokens[0], tokens[1])
    before = sum(sizes)
    with counted_activations(model) as sizes:
        (model.loss(tokens[0], tokens[1]) * torch.ones(1 << 20, requires_grad=True)).sum()
    assert sum(sizes) >= before + 4 * (1 << 20) > before > 0
    assert plain.requires_grad


@pytest.mark.parametrize(
    "settings", [{}, {"optim.name": "muon"}, {"optim.name": "muon", "optim.muon_split": True, "optim.muon_beta2": 0.95}]
)
def test_states_of_optimizers_are_predicted_byte_for_byte(settings: dict[str, Any]) -> None:
    config = CONFIG.changed(settings)
    model = GPT(config.model)
    optimizers = build_optimizers(model, config.optim)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    total = 0
    for optimizer in optimizers.values():
        optimizer.step()
        for state in optimizer.state.values():
            total += sum(value.nbytes for name, value in state.items() if name != "step")
    found = predict(config, device="cpu")
    assert found.optimizer == total
    assert found.parameters == found.gradients == sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("bits", [8, 4, "fp8"])
def test_quantised_states_are_predicted_byte_for_byte(bits: int | str) -> None:
    pytest.importorskip("torchao")
    from chatgot.techniques.low_bit_optimizer import low_bit

    config = CONFIG.changed({"techniques.low-bit-optimizer.bits": bits})
    model = GPT(config.model)
    optimizer = low_bit(build_optimizers(model, config.optim)["adamw"], bits=bits)
    total = 0
    for weight in model.parameters():
        for signed in (True, False):
            buffer = optimizer._new_buffer(weight, signed)
            parts = buffer.__tensor_flatten__()[0] if hasattr(buffer, "__tensor_flatten__") else []
            total += sum(getattr(buffer, part).nbytes for part in parts) if parts else buffer.nbytes
    assert predict(config, device="cpu").optimizer == total
    assert total < predict(CONFIG, device="cpu").optimizer / 2


class Held(TorchDispatchMode):
    """Notes the most bytes that tensors which are made within take at once, but for views of parameters."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self.live: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.live[id(each)] = (weakref.ref(each), storage.data_ptr(), storage.nbytes())
        alive = {place: size for known, place, size in self.live.values() if known() is not None}
        found = {place: size for place, size in alive.items() if place not in self.known}
        self.most = max(self.most, sum(found.values()))
        return result


@pytest.mark.parametrize("model", MODELS)
def test_memory_of_an_evaluation_is_predicted_within_a_tenth(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatgot.memory.LARGEST_TOKENS", 512)
    config = with_model(**MODELS[model])
    rows = evaluation_rows(activations_of(config.model, rows=8, on_cuda=False, effects=MemoryEffects()))
    tokens = torch.randint(config.model.vocab_size, (2, rows, config.model.context_length))
    network = GPT(config.model)
    with Held(network) as held:
        evaluate(network, [(tokens[0], tokens[1])])
    assert predict(config, device="cpu").evaluation == pytest.approx(held.most, rel=0.1)


@pytest.mark.parametrize(
    ("vocab_size", "rows", "expected"),
    [
        (65, 8, 256),  # 16,384 tokens: larger batches are not faster
        (65, 1000, 1000),
        (50_257, 1, 10),  # 256 MiB
        (50_257, 40, 60),  # as much as training: it has the logits three times
    ],
)
def test_evaluation_takes_no_more_memory_than_training(vocab_size: int, rows: int, expected: int) -> None:
    model = with_model(vocab_size=vocab_size).model
    training = activations_of(model, rows=rows, on_cuda=False, effects=MemoryEffects())
    assert evaluation_rows(training) == expected
    assert evaluation_bytes(model, expected) <= max(2**28, training.kept + training.logits)
    fused = MemoryEffects(loss_chunks=64)
    huge = activations_of(with_model(vocab_size=2_000_000).model, rows=1, on_cuda=False, effects=fused)
    assert evaluation_rows(huge) == 1


def predicted(changes: dict[str, object], device: str = "cpu") -> Ledger:
    return predict(CONFIG.changed(changes), device=device)


def test_memory_that_techniques_spare_is_counted_and_unpredicted_ones_are_listed() -> None:
    whole, halves = predicted({}), predicted({"techniques.gradient-accumulation.batches": 2})
    assert halves.activations * 2 == whole.activations
    assert halves.logits * 2 == whole.logits
    assert (whole.accumulated, halves.accumulated) == (False, True)
    large = {"model.vocab_size": 5000}
    assert predicted(large | {"techniques.fused-cross-entropy": "on"}).logits < predicted(large).logits / 2
    assert predicted({"techniques.compile": "on"}).unknown == ("compile",)
    assert predicted({"techniques.fused-optimizer": "on"}).unknown == ()
    gated = predicted({"techniques.activation-function.activation": "swiglu"})
    assert gated.activations > whole.activations
    dropout = {"model.dropout": 0.1}
    assert predicted(dropout, "cuda").activations < 0.6 * predicted(dropout).activations
    away = {**dropout, "techniques.optimizer-offload": "on"}
    assert predicted(away, "cuda").optimizer == 0
    assert predicted(away).optimizer > 0


def test_peak_is_the_maximum_of_backward_pass_and_update() -> None:
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer", "average", "copies", "recomputed", "update"), 0)
    sizes |= {"parameters": 10, "gradients": 10, "optimizer": 20, "update": 5, "evaluation": 14}
    many = Ledger(**sizes, activations=100, logits=30, accumulated=False)
    few = Ledger(**sizes, activations=1, logits=3, accumulated=False)
    both = Ledger(**sizes, activations=100, logits=30, accumulated=True)
    assert (many.peak, few.peak, both.peak) == (160, 45, 170)
    evaluated = Ledger(**sizes | {"evaluation": 80}, activations=1, logits=3, accumulated=False)
    assert (evaluated.peak_of_steps, evaluated.peak) == (45, 110)


@pytest.mark.parametrize("changes", [{}, {"model.activation": "swiglu", "model.d_ff": 200}, {"optim.muon_beta2": 0.95}])
def test_memory_of_a_muon_update_is_predicted_within_a_tenth(changes: dict[str, Any]) -> None:
    config = CONFIG.changed({"optim.name": "muon", "optim.implementation": "fused", **changes})
    model = GPT(config.model)
    optimizers = build_optimizers(model, config.optim)
    tokens = torch.randint(config.model.vocab_size, (2, 2, config.model.context_length))
    model.loss(tokens[0], tokens[1]).backward()
    optimizers["muon"].step()
    with Held(model) as held:
        optimizers["muon"].step()
    assert predict(config, device="cpu").update == pytest.approx(held.most, rel=0.1)
