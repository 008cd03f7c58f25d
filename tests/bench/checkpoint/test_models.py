"""Specs of models, and the tensors that are built from them."""

import math

import pytest

from tensorkeep.bench.checkpoint.models import OPENLLAMA_3B, build, parse, spec_of_size
from tensorkeep.errors import UsageError

TINY = "openllama-3b:scale=0.0005:layers=2"


def test_openllama_3b_has_the_known_parameters() -> None:
    spec = parse("openllama-3b")
    assert len(spec.shapes) == 237
    assert spec.weights == 3_426_473_600
    assert spec.nbytes == 2 * spec.weights
    assert spec.shapes["model.embed_tokens.weight"] == spec.shapes["lm_head.weight"] == (32_000, 3_200)
    assert spec.shapes["model.layers.25.mlp.down_proj.weight"] == (3_200, 8_640)


def test_parameters_are_in_the_order_of_hugging_face() -> None:
    names = list(parse("openllama-3b").shapes)
    assert names[:10] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_first_100_is_the_embedding_and_eleven_layers() -> None:
    spec = parse("openllama-3b:first-100")
    assert spec.weights == 1_465_414_400
    assert list(spec.shapes)[-1] == "model.layers.10.post_attention_layernorm.weight"


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.3, 1.0])
def test_scale_multiplies_the_number_of_weights(scale: float) -> None:
    spec = parse(f"openllama-3b:scale={scale}")
    assert spec.weights == pytest.approx(scale * 3_426_473_600, rel=0.05)
    assert all(size % 64 == 0 for shape in spec.shapes.values() for size in shape)
    assert len(spec.shapes) == 237


def test_scale_of_one_is_the_original_model() -> None:
    assert OPENLLAMA_3B.scaled(1.0) == OPENLLAMA_3B


def test_options_combine_in_any_order() -> None:
    assert parse("openllama-3b:float32:layers=3:first-4") == parse("openllama-3b:first-4:layers=3:float32")
    assert parse("openllama-3b:layers=3:first-4:float32").nbytes == 4 * (32_000 * 3_200 + 3 * 3_200**2)


@pytest.mark.parametrize(
    "spec",
    [
        "gpt-5",
        "",
        "openllama-3b:",
        "openllama-3b:int8",
        "openllama-3b:first-0",
        "openllama-3b:first-238",
        "openllama-3b:first-100:layers=3",
        "openllama-3b:first=100",
        "openllama-3b:layers=0",
        "openllama-3b:layers=1.5",
        "openllama-3b:layers=1:layers=2",
        "openllama-3b:float16:float32",
        "openllama-3b:scale=nan",
        "openllama-3b:scale=-1",
        "openllama-3b:scale=1e9",
        "openllama-3b:scale=100",
    ],
)
def test_invalid_spec_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(spec)
    assert "\n" not in caught.value.message
    assert caught.value.remedy is not None
    assert "openllama-3b:scale=0.1" in caught.value.remedy


@pytest.mark.parametrize(("nbytes", "spec"), [(2_000_000_000, "layers=6"), (700_000_000, "layers=1")])
def test_size_is_reached_with_fewer_layers(nbytes: int, spec: str) -> None:
    assert spec_of_size(nbytes) == f"openllama-3b:{spec}:bfloat16"


@pytest.mark.parametrize("nbytes", [50_000_000, 300_000_000, 700_000_000, 2_000_000_000])
def test_size_is_reached_within_15_percent(nbytes: int) -> None:
    assert parse(spec_of_size(nbytes)).nbytes == pytest.approx(nbytes, rel=0.15)


def test_weights_are_normal_and_norms_are_one() -> None:
    import torch

    tensors = build(TINY + ":float32", seed=3)
    assert list(tensors) == list(parse(TINY).shapes)
    weights = tensors["model.layers.1.mlp.up_proj.weight"]
    assert weights.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean().item()) < 5 * 0.02 / math.sqrt(weights.numel())
    assert torch.equal(tensors["model.norm.weight"], torch.ones(64))


def test_values_depend_on_seed_and_position_only() -> None:
    import torch

    whole, again, first, other = build(TINY), build(TINY), build(TINY + ":first-3"), build(TINY, seed=1)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(whole[name], first[name]) for name in first)
    names = [name for name in whole if "norm" not in name]
    assert not any(torch.equal(whole[name], other[name]) for name in names)
    assert not torch.equal(whole[names[1]], whole[names[2]])
    assert whole[names[0]].dtype == torch.bfloat16
