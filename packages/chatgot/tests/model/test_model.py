"""The model: against a plain one, its gradients, its initial weights, its cache."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import plain_gpt
from chatgot.model.config import ModelConfig, RopeScaling
from chatgot.model.gpt import GPT, token_loss
from chatgot.step.train_step import evaluating
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case

CHOICES = {
    "positions": ("learned", "rotary"),
    "token_shift": (False, True, "blocks"),
    "convolution": (1, 3),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu"),
    "bias": (False, True),
    "tied": (False, True),
}
COMBINATIONS = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
# They have each two choices together.
PAIRS = [COMBINATIONS[(175 + 33 * number) % len(COMBINATIONS)] for number in range(19)]
SHIFTED = {"token_shift": "blocks", "convolution": 4}
LAYOUTS = [
    pytest.param({"positions": "learned"}, id="learned"),
    pytest.param({"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}, id="rotary"),
    pytest.param({"positions": "rotary", "token_shift": True}, id="shifted"),
    pytest.param(SHIFTED, id="convolved"),
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

SIZES: dict[str, Any] = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 8}


def build(*, seed: int = 0, **parts: Any) -> GPT:
    """Return a tiny model in which every weight matters."""
    model = GPT(ModelConfig(**SIZES | parts), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


def watched(model: GPT) -> list[dict[str, Any]]:
    """Replace the kernels of attention by one in plain arithmetic; return a list of the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        calls.append({"query": query, "key": key, "value": value, **options})
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        assert options["is_causal"]
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1) @ value

    for block in model.blocks:
        block.attention.kernel = kernel
    return calls


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "combinations",
    [
        pytest.param(PAIRS, id="pairs", marks=pytest.mark.exhaustive),
        pytest.param([{"n_heads": 4, **each} for each in GROUPED], id="grouped"),
        # All of them, a few in each test: the time of a test is limited.
        *(pytest.param(COMBINATIONS[first::10], marks=pytest.mark.exhaustive) for first in range(10)),
    ],
)
def test_logits_and_gradients_match_the_plain_model(combinations: list[dict[str, Any]]) -> None:
    tokens = some_tokens(2, 5)
    for parts in combinations:
        with case(parts):
            model = build(**parts).double()
            weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
            ours, plain = model(tokens), plain_gpt.logits(model.config, weights, tokens)
            # The tables of rotary positions are float32.
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
            weighting = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            (ours * weighting).sum().backward()
            (plain * weighting).sum().backward()
            for name, parameter in model.named_parameters():
                with case(name):
                    torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-4)


def test_the_combinations_have_each_two_choices_together() -> None:
    for (one, some), (other, more) in itertools.combinations(CHOICES.items(), 2):
        assert {(parts[one], parts[other]) for parts in PAIRS} == set(itertools.product(some, more))


@pytest.mark.parametrize("parts", LAYOUTS)
def test_attention_is_causal(parts: dict[str, Any]) -> None:
    """A batch has the same tokens with a change at each place but the first."""
    model = build(**parts)
    for length in (2, 5, 8):
        tokens = some_tokens(1, length, seed=length)
        changed = tokens.repeat(length - 1, 1)
        places = range(1, length)
        changed[torch.arange(length - 1), places] = (tokens[0, 1:] + torch.arange(1, length)) % 11
        before, after = model(tokens)[0], model(changed)
        for place, logits in zip(places, after, strict=True):
            torch.testing.assert_close(logits[:place], before[:place], rtol=0, atol=1e-6)
            assert not torch.allclose(logits[place], before[place], atol=1e-3), (length, place)


def test_rotary_attention_depends_on_distances_only() -> None:
    model = build(positions="rotary", n_layers=1)
    same = torch.full((1, 6), 4)
    same[0, 0] = same[0, 3] = 7
    (call, *_), _ = watched(model), model(same)
    scores = (call["query"] @ call["key"].transpose(-1, -2))[0]
    torch.testing.assert_close(scores[:, 1, 0], scores[:, 4, 3])
    assert not torch.allclose(scores[:, 1, 0], scores[:, 4, 0], atol=1e-3)


def test_features_and_head_make_the_logits_and_the_loss_is_the_mean_over_targets_that_count() -> None:
    model = build()
    tokens, targets = some_tokens(2, 6), some_tokens(2, 6, seed=1)
    assert torch.equal(functional.linear(model.features(tokens), model.head.weight), model(tokens))
    targets[0, :4] = -1
    chances = model(tokens).softmax(-1)
    wanted = [-chances[b, t, targets[b, t]].log() for b in range(2) for t in range(6) if targets[b, t] != -1]
    torch.testing.assert_close(model.loss(tokens, targets), torch.stack(wanted).mean())
    assert len(wanted) == 8
    # It is computed in float32.
    logits = torch.randn(1, 50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(50).unsqueeze(0)
    assert token_loss(logits, targets).dtype == torch.float32
    assert token_loss(logits, targets) == functional.cross_entropy(logits[0].float(), targets[0])


def test_a_tied_head_is_the_embedding() -> None:
    model = build(tied=True)
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert build(tied=False).head.weight is not build(tied=False).tokens.weight
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.tokens.weight
    assert copied.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_models_with_any_activation_can_be_pickled() -> None:
    for activation in ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu"):
        with case(activation):
            model, tokens = build(activation=activation), torch.tensor([[1, 2, 3]])
            assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), model(tokens))


def test_names_of_tensors_in_checkpoints() -> None:
    parts: dict[str, Any] = {"activation": "geglu", "token_shift": "blocks", "convolution": 3}
    model = GPT(ModelConfig(vocab_size=5, context_length=4, n_layers=1, n_heads=1, d_model=4, **parts))
    block = "norm1.weight shift1.share attention.qkv.weight attention.convolution.taps.0 attention.convolution.taps.1"
    block += " attention.out.weight norm2.weight shift2.share mlp.up.weight mlp.gate.weight mlp.down.weight"
    assert list(model.state_dict()) == [
        *("tokens.weight", "shift.share", "positions.weight"),
        *(f"blocks.0.{name}" for name in block.split()),
        *("norm.weight", "head.weight"),
    ]
    rotary = build(positions="rotary", bias=True, norm="rmsnorm", n_layers=1).state_dict()
    biases = [f"blocks.0.{name}.bias" for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    assert [name for name in rotary if name.endswith("bias")] == biases
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


@pytest.mark.parametrize("parts", LAYOUTS)
def test_initial_weights_depend_on_the_generator_only_also_of_a_model_on_meta(parts: dict[str, Any]) -> None:
    config = ModelConfig(**SIZES | parts)
    before = torch.get_rng_state()
    first, other = (GPT(config, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    late = GPT(config, device="meta")
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    late.initialise(torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), before)
    assert late.head.weight is late.tokens.weight
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, late.state_dict()[name]), name
    tokens = some_tokens(1, 8)
    assert torch.equal(late(tokens), first(tokens))
    assert not torch.equal(first.tokens.weight, other.tokens.weight)
    torch.manual_seed(5)
    assert torch.equal(GPT(config).tokens.weight, first.tokens.weight)


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


def test_dropout_acts_in_training_only_also_on_attention_weights() -> None:
    model = build(dropout=0.5)
    tokens = some_tokens(2, 6)
    torch.manual_seed(0)
    assert not torch.equal(model(tokens), model(tokens))
    with evaluating(model):
        assert torch.equal(model(tokens), model(tokens))
        assert torch.equal(model(tokens), build()(tokens))
    calls = watched(model)
    model(tokens)
    model.eval()(tokens)
    assert [call["dropout_p"] for call in calls] == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("parts", [{"positions": "rotary"}, {"n_heads": 4, "kv_heads": 2}], ids=str)
def test_kernel_and_block_forward_can_be_replaced(parts: dict[str, Any]) -> None:
    """A kernel gets as many heads of keys as of queries."""
    model, tokens = build(**parts), some_tokens(2, 6)
    wanted, names = model(tokens), list(model.state_dict())
    kernel_calls, calls = watched(model), []
    for block in model.blocks:
        block.forward = lambda *args, forward=block.forward: calls.append(1) or forward(*args)
    torch.testing.assert_close(model(tokens), wanted)
    assert len(calls) == len(kernel_calls) == 2
    assert list(model.state_dict()) == names
    for call in kernel_calls:
        assert call["query"].shape == call["key"].shape == call["value"].shape


def compositions(total: int) -> list[list[int]]:
    """Return all ways to cut a text into pieces of at most four tokens."""
    shorter = [[first, *rest] for first in range(1, min(total, 4) + 1) for rest in compositions(total - first)]
    return shorter or [[]]


@pytest.mark.parametrize("parts", LAYOUTS)
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_cached_pieces_of_any_length_match_one_forward_pass(parts: dict[str, Any], every: int) -> None:
    model, tokens = build(**parts), some_tokens(3, 8)
    # The first cuts are single tokens.
    assert compositions(8)[0] == [1] * 8
    with torch.no_grad():
        whole, cache = model(tokens), model.new_cache(3)
        for pieces in compositions(8)[::every]:
            steps = torch.cat([model(piece, cache) for piece in tokens.split(pieces, dim=1)], dim=1)
            torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-5, msg=lambda m, p=pieces: f"{p}: {m}")
            assert torch.equal(steps.argmax(-1), whole.argmax(-1)), pieces
            assert cache.length == 8
            cache.clear()


def test_cache_has_the_dtype_of_the_weights_and_the_heads_of_keys_and_values_only() -> None:
    model = build(positions="rotary").bfloat16()
    tokens = some_tokens(1, 4)
    with torch.no_grad():
        cache = model.new_cache(1)
        cached = torch.cat([model(tokens[:, :3], cache), model(tokens[:, 3:], cache)], dim=1)
    assert cached.dtype == torch.bfloat16
    torch.testing.assert_close(cached.float(), model(tokens).float(), rtol=0.05, atol=0.2)
    cache = build(n_heads=4, kv_heads=1).new_cache(3)
    keys, values = cache.layers[0].extend(torch.ones(3, 1, 5, 2), torch.ones(3, 1, 5, 2))
    assert keys.shape == values.shape == (3, 1, 5, 2)


@pytest.mark.parametrize("parts", LAYOUTS)
def test_autocast_works(parts: dict[str, Any]) -> None:
    model, tokens = build(**parts), some_tokens(2, 6)
    calls = watched(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        model.loss(tokens, tokens).backward()
    assert logits.dtype == torch.bfloat16
    assert {call[name].dtype for call in calls for name in ("query", "key", "value")} == {torch.bfloat16}
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0.1, atol=0.5)
    assert model.tokens.weight.grad.isfinite().all()


@pytest.mark.integration
@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(
            {"positions": "rotary", "qk_norm": True, **SHIFTED, "n_layers": 1},
            id="all but grouped",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"n_heads": 4, "kv_heads": 2, "n_layers": 1}, id="grouped only", marks=pytest.mark.exhaustive),
        *(pytest.param(*each.values, id=each.id, marks=pytest.mark.exhaustive) for each in LAYOUTS),
    ],
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
