"""The configuration of the model: what it refuses, and the numbers that follow from it."""

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tensorkeep.errors import UsageError
from tensorkeep.train.model.config import ModelConfig, RopeScaling
from tensorkeep.train.model.gpt import GPT

SIZES: dict[str, Any] = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 12}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"context_length": -1}, "context_length is -1"),
        ({"n_layers": True}, "n_layers is True"),
        ({"n_heads": 2.0}, "n_heads is 2.0"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"d_model": 13}, "d_model=13 is not a multiple of n_heads=2"),
        ({"d_model": 6, "positions": "rotary"}, "even head size, and d_model / n_heads is 3"),
        ({"positions": "alibi"}, "positions is 'alibi'"),
        ({"norm": None}, "norm is None"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"bias": 1}, "bias is 1"),
        ({"tied": "yes"}, "tied is 'yes'"),
        ({"token_shift": "all"}, "token_shift is 'all'"),
        ({"convolution": 0}, "convolution is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"rope_base": 0.0}, "rope_base is 0.0"),
        ({"norm_eps": float("inf")}, "norm_eps is inf"),
        ({"init_std": -0.02}, "init_std is -0.02"),
        ({"init_std": "0.02"}, "init_std is '0.02'"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"n_heads": 6, "kv_heads": 4}, "n_heads=6 is not a multiple of kv_heads=4"),
        ({"rope_scaling": RopeScaling(kind="linear")}, "learned positions have no angles to scale"),
    ],
)
def test_invalid_model_is_refused_with_the_field_and_a_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ModelConfig(**{**SIZES, **change})
    assert caught.value.remedy


def test_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="n_layer"):
        msgspec.convert({**SIZES, "n_layer": 3}, ModelConfig)


def test_configuration_survives_json_and_is_checked_on_decoding() -> None:
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


@pytest.mark.parametrize(
    "parts",
    [
        (*each, shift, width)
        for each in itertools.product(
            ("learned", "rotary"), ("layernorm", "rmsnorm"), ("gelu", "swiglu"), *[(False, True)] * 2
        )
        for shift, width in ((False, 1), (True, 1), ("blocks", 3))
    ],
    ids=lambda parts: "-".join(map(str, parts)),
)
def test_parameter_count_matches_the_model(parts: Any) -> None:
    fields = ("positions", "norm", "activation", "bias", "tied", "token_shift", "convolution")
    model = GPT(ModelConfig(**SIZES, **dict(zip(fields, parts, strict=True))), device="meta")
    counted = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert model.config.parameter_count() == sum(counted.values())
    assert model.config.parameter_count(embeddings=False) == sum(
        count for name, count in counted.items() if name not in ("tokens.weight", "positions.weight")
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [{"kv_heads": 1}, {"qk_norm": True}, {"n_heads": 6, "kv_heads": 3, "qk_norm": True}])
def test_parameters_of_grouped_and_normalised_heads_are_counted(parts: dict[str, Any], bias: bool) -> None:
    model = GPT(ModelConfig(**{**SIZES, **parts, "bias": bias}), device="meta")
    assert model.config.parameter_count() == sum(each.numel() for each in model.parameters())


def test_heads_of_keys_that_are_as_many_as_the_heads_are_not_grouped() -> None:
    both = [GPT(ModelConfig(**SIZES, kv_heads=heads), device="meta").state_dict() for heads in (None, 2)]
    assert list(both[0]) == list(both[1])


def test_the_band_of_a_rope_scaling_must_not_be_empty() -> None:
    with pytest.raises(UsageError, match=r"rope_scaling\.high_frequency_factor is 1") as caught:
        RopeScaling(high_frequency_factor=1.0)
    assert caught.value.remedy == "give a number above low_frequency_factor, 1"


def test_the_124_million_parameters_of_gpt2() -> None:
    config = ModelConfig(vocab_size=50257, context_length=1024, n_layers=12, n_heads=12, d_model=768, bias=True)
    assert config.parameter_count() == 124_439_808


@pytest.mark.parametrize("activation", ["gelu", "geglu"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_flops_match_the_counter_of_torch(activation: Any, positions: Any, kv_heads: Any) -> None:
    config = ModelConfig(**SIZES, activation=activation, positions=positions, kv_heads=kv_heads)
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
