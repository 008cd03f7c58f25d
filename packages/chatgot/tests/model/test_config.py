"""The configuration of the model: what it refuses, and the numbers that follow from it."""

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from chatgot.model.config import LoraConfig, ModelConfig, RopeScaling
from chatgot.model.gpt import GPT
from tensorkeep.errors import UsageError

SIZES: dict[str, Any] = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 12}
INVALID: dict[str, list[Any]] = {"vocab_size": [0], "context_length": [-1], "n_layers": [True], "n_heads": [2.0]}
INVALID |= {"d_ff": [0], "kv_heads": [0], "head_dim": [0], "convolution": [0], "token_shift": ["all"], "tied": ["yes"]}
INVALID |= {"positions": ["alibi"], "norm": [None], "activation": ["relu"], "bias": [1], "rope_base": [0.0]}
INVALID |= {"dropout": [1.0, -0.1, float("nan")], "norm_eps": [float("inf")], "init_std": [-0.02, "0.02"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: value}, f"{name} is {value!r}") for name, values in INVALID.items() for value in values),
        ({"d_model": 13}, "d_model=13 is not a multiple of n_heads=2"),
        ({"d_model": 6, "positions": "rotary"}, "even head size, and it is 3"),
        ({"head_dim": 5, "positions": "rotary"}, "even head size, and it is 5"),
        ({"n_heads": 6, "kv_heads": 4}, "n_heads=6 is not a multiple of kv_heads=4"),
        ({"vocab_padding": 11}, "vocab_padding=11 leaves no token of vocab_size=11"),
        ({"rope_scaling": RopeScaling(kind="linear")}, "learned positions have no angles to scale"),
    ],
)
def test_invalid_model_is_refused_with_the_field_and_a_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ModelConfig(**{**SIZES, **change})
    assert caught.value.remedy


def test_configuration_survives_json_and_is_checked_also_in_its_parts() -> None:
    with pytest.raises(UsageError, match=r"rope_scaling\.high_frequency_factor is 1") as caught:
        RopeScaling(high_frequency_factor=1.0)
    assert caught.value.remedy == "give a number above low_frequency_factor, 1"
    with pytest.raises(msgspec.ValidationError, match="n_layer"):
        msgspec.convert({**SIZES, "n_layer": 3}, ModelConfig)
    config = ModelConfig(**SIZES, positions="rotary", dropout=0.1)
    written = msgspec.json.encode(config)
    assert msgspec.json.decode(written, type=ModelConfig) == config
    with pytest.raises(msgspec.ValidationError, match="d_model=12"):
        msgspec.json.decode(written.replace(b'"n_heads":2', b'"n_heads":5'), type=ModelConfig)


@pytest.mark.parametrize(
    ("d_model", "activation", "width"),
    [(12, "gelu", 48), (12, "relu2", 48), (12, "swiglu", 32), (128, "geglu", 344), (768, "swiglu", 2048)],
)
def test_hidden_width_defaults_to_a_multiple_of_d_model(d_model: int, activation: Any, width: int) -> None:
    sizes = {**SIZES, "d_model": d_model}
    assert ModelConfig(**sizes, activation=activation).mlp_width == width
    assert ModelConfig(**sizes, activation=activation, d_ff=20).mlp_width == 20


CHOICES = {
    "positions": ("learned", "rotary"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "swiglu"),
    "bias": (False, True),
    "tied": (False, True),
    "shifts": ({}, {"token_shift": True}, {"token_shift": "blocks", "convolution": 3}),
}
GROUPED: list[dict[str, Any]] = [{"kv_heads": 1}, {"qk_norm": True}, {"n_heads": 6, "kv_heads": 3, "qk_norm": True}]
GROUPED += [{"head_dim": 4, "n_heads": 5}, {"head_dim": 10, "kv_heads": 1, "lora": LoraConfig(rank=2)}]
COMBINATIONS = [
    *({**dict(zip(CHOICES, each, strict=True)), **each[-1]} for each in itertools.product(*CHOICES.values())),
    *({**parts, "bias": bias, "shifts": {}} for parts in GROUPED for bias in (False, True)),
]
# They have each two choices together.
PAIRS = [*COMBINATIONS[:96:11], *COMBINATIONS[96:]]


@pytest.mark.parametrize("combinations", [PAIRS, pytest.param(COMBINATIONS, marks=pytest.mark.exhaustive)], ids=len)
def test_parameter_count_matches_the_model(combinations: list[dict[str, Any]]) -> None:
    for parts in combinations:
        own = {name: value for name, value in parts.items() if name != "shifts"}
        model = GPT(ModelConfig(**{**SIZES, **own}), device="meta")
        counted = {name: parameter.numel() for name, parameter in model.named_parameters()}
        assert model.config.parameter_count() == sum(counted.values()), own
        assert model.config.parameter_count(embeddings=False) == sum(
            count for name, count in counted.items() if name not in ("tokens.weight", "positions.weight")
        ), own


def test_the_combinations_have_each_two_choices_together() -> None:
    for (one, some), (other, more) in itertools.combinations(CHOICES.items(), 2):
        for pair in itertools.product(some, more):
            assert pair in [(parts.get(one), parts.get(other)) for parts in PAIRS], (one, other)


def test_the_124_million_parameters_of_gpt2_and_heads_of_keys_that_are_as_many_as_the_heads() -> None:
    config = ModelConfig(vocab_size=50257, context_length=1024, n_layers=12, n_heads=12, d_model=768, bias=True)
    assert config.parameter_count() == 124_439_808
    one, other = (GPT(ModelConfig(**SIZES, kv_heads=heads), device="meta").state_dict() for heads in (None, 2))
    assert list(one) == list(other)


@pytest.mark.parametrize(
    ("activation", "positions", "kv_heads"),
    [("gelu", "learned", None), ("gelu", "rotary", 1), ("geglu", "learned", 1), ("geglu", "rotary", None)],
)
def test_flops_match_the_counter_of_torch(activation: Any, positions: Any, kv_heads: Any) -> None:
    head_dim = 10 if activation == "geglu" else None
    config = ModelConfig(**SIZES, activation=activation, positions=positions, kv_heads=kv_heads, head_dim=head_dim)
    model = GPT(config)
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    # As matrix products, which torch counts; its kernel for the CPU, it does not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(tokens, tokens).backward()
    assert counter.get_total_flops() == 15 * config.flops_per_token(5)


def test_flops_grow_with_the_length_of_the_sequences() -> None:
    config = ModelConfig(**SIZES)
    assert config.flops_per_token() == config.flops_per_token(8)
    assert config.flops_per_token(9) - config.flops_per_token(8) == 12 * 2 * 12
    with pytest.raises(UsageError, match="context_length is 0"):
        config.flops_per_token(0)
