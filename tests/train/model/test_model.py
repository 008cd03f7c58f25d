"""The model: against a plain one, its gradients, its initial weights, its cache."""

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tensorkeep.errors import UsageError
from tensorkeep.train.evaluate import evaluating
from tensorkeep.train.model.config import ModelConfig, RopeScaling
from tensorkeep.train.model.gpt import GPT, token_loss
from train import plain_gpt

CHOICES = {
    "positions": ("learned", "rotary"),
    "token_shift": (False, True, "blocks"),
    "convolution": (1, 3),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu"),
    "bias": (False, True),
    "tied": (False, True),
}
# Every seventh has each two choices together; the others are for `make torture`.
COMBINATIONS = [
    pytest.param(dict(zip(CHOICES, values, strict=True)), marks=[pytest.mark.slow] if number % 7 else [])
    for number, values in enumerate(itertools.product(*CHOICES.values()))
]
LAYOUTS = [
    pytest.param({"positions": "learned"}, id="learned"),
    pytest.param({"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}, id="rotary"),
    pytest.param({"positions": "rotary", "token_shift": True}, id="shifted"),
    pytest.param({"token_shift": "blocks", "convolution": 4}, id="convolved"),
    pytest.param({"n_heads": 4, "kv_heads": 2, "qk_norm": True, "positions": "rotary"}, id="grouped"),
]
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_context_length": 40}
GROUPED = [
    {"kv_heads": 1, "bias": True},
    {"kv_heads": 2, "positions": "rotary"},
    {"kv_heads": 1, "qk_norm": True, "positions": "rotary", "norm": "rmsnorm"},
    {"qk_norm": True, "positions": "rotary"},
    {"qk_norm": True},
    {"positions": "rotary", "d_model": 32, "rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    {"positions": "rotary", "d_model": 32, "rope_scaling": RopeScaling(**LLAMA3)},
]


def build(*, seed: int = 0, **parts: Any) -> GPT:
    """Return a tiny model in which every weight matters."""
    sizes = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 8} | parts
    model = GPT(ModelConfig(**sizes), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "parts",
    [*COMBINATIONS, *({"n_heads": 4, **each} for each in GROUPED)],
    ids=lambda p: "-".join(map(str, p.values())),
)
def test_logits_and_gradients_match_the_plain_model(parts: dict[str, Any]) -> None:
    model = build(**parts).double()
    tokens = some_tokens(2, 5)
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
    ours, plain = model(tokens), plain_gpt.logits(model.config, weights, tokens)
    # The tables of rotary positions are float32.
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    weighting = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (ours * weighting).sum().backward()
    (plain * weighting).sum().backward()
    for name, parameter in model.named_parameters():
        assert weights[name].grad is not None, name
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("parts", LAYOUTS)
@given(data=st.data())
def test_attention_is_causal(parts: dict[str, Any], data: st.DataObject) -> None:
    model = build(**parts)
    tokens = torch.tensor([data.draw(st.lists(st.integers(0, 10), min_size=2, max_size=8))])
    place = data.draw(st.integers(1, tokens.shape[1] - 1))
    changed = tokens.clone()
    changed[0, place] = (changed[0, place] + data.draw(st.integers(1, 10))) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, place], before[:, place], atol=1e-3)


def test_rotary_attention_depends_on_distances_only() -> None:
    model = build(positions="rotary", n_layers=1)
    same = torch.full((1, 6), 4)
    same[0, 0] = same[0, 3] = 7
    seen: list[Tensor] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **_: Any) -> Tensor:
        seen.append(query @ key.transpose(-1, -2))
        return value

    model.blocks[0].attention.kernel = kernel
    model(same)
    torch.testing.assert_close(seen[0][0, :, 1, 0], seen[0][0, :, 4, 3])
    assert not torch.allclose(seen[0][0, :, 1, 0], seen[0][0, :, 4, 0], atol=1e-3)


def test_the_loss_is_the_mean_over_targets_that_count() -> None:
    model = build()
    tokens, targets = some_tokens(2, 6), some_tokens(2, 6, seed=1)
    targets[0, :4] = -1
    chances = model(tokens).softmax(-1)
    wanted = [-chances[b, t, targets[b, t]].log() for b in range(2) for t in range(6) if targets[b, t] != -1]
    torch.testing.assert_close(model.loss(tokens, targets), torch.stack(wanted).mean())
    assert len(wanted) == 8


def test_the_loss_is_computed_in_float32() -> None:
    logits = torch.randn(1, 50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(50).unsqueeze(0)
    assert token_loss(logits, targets).dtype == torch.float32
    assert token_loss(logits, targets) == functional.cross_entropy(logits[0].float(), targets[0])


def test_features_and_head_make_the_logits() -> None:
    model = build()
    tokens = some_tokens(3, 4)
    assert torch.equal(functional.linear(model.features(tokens), model.head.weight), model(tokens))


def test_kernels_of_techniques_get_as_many_key_heads_as_query_heads() -> None:
    model, tokens = build(n_heads=4, kv_heads=2), some_tokens(1, 4)
    expected, shapes = model(tokens), set()

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        shapes.update((query.shape, key.shape, value.shape))
        return functional.scaled_dot_product_attention(query, key, value, **options)

    for block in model.blocks:
        block.attention.kernel = kernel
    torch.testing.assert_close(model(tokens), expected)
    assert shapes == {torch.Size([1, 4, 4, 2])}


def test_cache_holds_the_heads_of_keys_and_values_only() -> None:
    model = build(n_heads=4, kv_heads=1)
    cache = model.new_cache(3)
    keys, values = cache.layers[0].extend(torch.ones(3, 1, 5, 2), torch.ones(3, 1, 5, 2))
    assert keys.shape == values.shape == (3, 1, 5, 2)


def test_a_tied_head_is_the_embedding() -> None:
    model = build(tied=True)
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert build(tied=False).head.weight is not build(tied=False).tokens.weight
    assert copy.deepcopy(model).head.weight.data_ptr() != model.head.weight.data_ptr()
    moved = copy.deepcopy(model)
    assert moved.head.weight is moved.tokens.weight


def test_names_of_tensors_in_checkpoints() -> None:
    parts: dict[str, Any] = {"activation": "geglu", "token_shift": "blocks", "convolution": 3}
    model = GPT(ModelConfig(vocab_size=5, context_length=4, n_layers=1, n_heads=1, d_model=4, **parts))
    assert list(model.state_dict()) == [
        "tokens.weight",
        "shift.share",
        "positions.weight",
        "blocks.0.norm1.weight",
        "blocks.0.shift1.share",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.convolution.taps.0",
        "blocks.0.attention.convolution.taps.1",
        "blocks.0.attention.out.weight",
        "blocks.0.norm2.weight",
        "blocks.0.shift2.share",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
        "head.weight",
    ]
    rotary = build(positions="rotary", bias=True, norm="rmsnorm", n_layers=1).state_dict()
    assert [name for name in rotary if name.endswith("bias")] == [
        "blocks.0.attention.qkv.bias",
        "blocks.0.attention.out.bias",
        "blocks.0.mlp.up.bias",
        "blocks.0.mlp.down.bias",
    ]
    assert "positions.weight" not in rotary


def test_initial_weights_are_gpt2s() -> None:
    sizes = {"vocab_size": 500, "context_length": 64, "n_layers": 8, "n_heads": 2, "d_model": 64}
    config = ModelConfig(**sizes, token_shift="blocks", convolution=3, bias=True, tied=False)
    model = GPT(config, generator=torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm" in name and "weight" in name))), name
            continue
        wanted = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name
        assert abs(parameter.mean().item()) < wanted / 10, name


def test_initial_weights_depend_on_the_generator_only() -> None:
    config = ModelConfig(vocab_size=11, context_length=8, n_layers=2, n_heads=2, d_model=8, positions="rotary")
    before = torch.get_rng_state()
    first = GPT(config, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), before)
    second = GPT(config, generator=torch.Generator().manual_seed(5))
    other = GPT(config, generator=torch.Generator().manual_seed(6))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not torch.equal(first.tokens.weight, other.tokens.weight)
    torch.manual_seed(5)
    assert torch.equal(GPT(config).tokens.weight, first.tokens.weight)


@pytest.mark.parametrize("parts", LAYOUTS)
def test_model_on_meta_is_initialised_later(parts: dict[str, Any]) -> None:
    config = ModelConfig(**{"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 8, **parts})
    late = GPT(config, device="meta")
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    late.initialise(torch.Generator().manual_seed(5))
    assert late.head.weight is late.tokens.weight
    tokens = some_tokens(1, 8)
    assert torch.equal(late(tokens), GPT(config, generator=torch.Generator().manual_seed(5))(tokens))


def test_more_tokens_than_the_context_are_refused() -> None:
    model = build()
    assert model(some_tokens(1, 8)).shape == (1, 8, 11)
    with pytest.raises(UsageError, match="9 tokens do not fit into the context of 8") as caught:
        model(some_tokens(1, 9))
    assert "the last 8" in (caught.value.remedy or "")
    cache = model.new_cache(1)
    with torch.no_grad():
        model(some_tokens(1, 6), cache)
        with pytest.raises(UsageError, match="9 tokens"):
            model(some_tokens(1, 3), cache)
    with pytest.raises(UsageError, match="1 dimensions"):
        model(some_tokens(4))


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    tokens = some_tokens(2, 6)
    torch.manual_seed(0)
    assert not torch.equal(model(tokens), model(tokens))
    with evaluating(model):
        assert torch.equal(model(tokens), model(tokens))
        assert torch.equal(model(tokens), build()(tokens))


def test_attention_weights_are_dropped_too() -> None:
    model = build(dropout=0.5)
    asked: list[float] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        asked.append(options["dropout_p"])
        return value

    for block in model.blocks:
        block.attention.kernel = kernel
    model(some_tokens(1, 4))
    model.eval()(some_tokens(1, 4))
    assert asked == [0.5, 0.5, 0.0, 0.0]


def test_kernel_and_block_forward_can_be_replaced() -> None:
    model = build(positions="rotary")
    tokens = some_tokens(2, 6)
    wanted = model(tokens)
    names = list(model.state_dict())

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, *, is_causal: bool, **_: Any) -> Tensor:
        assert is_causal
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1) @ value

    calls = []
    for block in model.blocks:
        block.attention.kernel = kernel
        block.forward = lambda *args, forward=block.forward: calls.append(1) or forward(*args)
    torch.testing.assert_close(model(tokens), wanted)
    assert len(calls) == 2
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("parts", LAYOUTS)
def test_cached_tokens_one_by_one_match_one_forward_pass(parts: dict[str, Any], batch: int) -> None:
    model = build(**parts)
    tokens = some_tokens(batch, 8)
    with torch.no_grad():
        whole = model(tokens)
        cache = model.new_cache(batch)
        for position in range(8):
            step = model(tokens[:, position : position + 1], cache)
            torch.testing.assert_close(step[:, 0], whole[:, position], rtol=1e-5, atol=1e-5)
            assert torch.equal(step[:, 0].argmax(-1), whole[:, position].argmax(-1))
            assert cache.length == position + 1


@pytest.mark.parametrize("parts", LAYOUTS)
@given(pieces=st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda pieces: sum(pieces) <= 8))
def test_cached_pieces_of_any_length_match_one_forward_pass(parts: dict[str, Any], pieces: list[int]) -> None:
    model = build(**parts)
    tokens = some_tokens(2, sum(pieces))
    with torch.no_grad():
        cache = model.new_cache(2)
        for _ in range(2):  # once more, after it was cleared
            steps = torch.cat([model(piece, cache) for piece in tokens.split(pieces, dim=1)], dim=1)
            torch.testing.assert_close(steps, model(tokens), rtol=1e-5, atol=1e-5)
            cache.clear()


def test_cache_has_the_dtype_of_the_weights() -> None:
    model = build(positions="rotary").bfloat16()
    tokens = some_tokens(1, 4)
    with torch.no_grad():
        cache = model.new_cache(1)
        cached = torch.cat([model(tokens[:, :3], cache), model(tokens[:, 3:], cache)], dim=1)
    assert cached.dtype == torch.bfloat16
    torch.testing.assert_close(cached.float(), model(tokens).float(), rtol=0.05, atol=0.2)


@pytest.mark.parametrize("parts", LAYOUTS)
def test_autocast_works(parts: dict[str, Any]) -> None:
    model, given_to_kernel = build(**parts), set()
    tokens = some_tokens(2, 6)

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        given_to_kernel.update((query.dtype, key.dtype, value.dtype))
        return functional.scaled_dot_product_attention(query, key, value, **options)

    model.blocks[0].attention.kernel = kernel
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        model.loss(tokens, tokens).backward()
    assert logits.dtype == torch.bfloat16
    assert given_to_kernel == {torch.bfloat16}
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0.1, atol=0.5)
    assert model.tokens.weight.grad is not None
    assert model.tokens.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "parts",
    [*LAYOUTS[-2:], *(pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in LAYOUTS[:-2])],
)
def test_model_compiles_without_a_graph_break(parts: dict[str, Any]) -> None:
    model, tokens = build(**parts), some_tokens(2, 6)
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    compiled(tokens, tokens).backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.loss(tokens, tokens).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    torch.compiler.reset()


def test_evaluating_restores_the_mode_of_each_module() -> None:
    model = build()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyboardInterrupt), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyboardInterrupt
    assert [module.training for module in model.modules()] == modes
    assert model.training
    assert not model.blocks[0].training
