"""Specs of models, and the tensors that are built from them."""

import math

import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case
from tensorkeep_bench.checkpoint.models import OPENLLAMA_3B, build, parse, spec_of_size

TINY = "openllama-3b:scale=0.0005:layers=2"


def test_openllama_3b_has_the_known_parameters_in_the_order_of_hugging_face() -> None:
    spec = parse("openllama-3b")
    assert (len(spec.shapes), spec.weights, spec.nbytes) == (237, 3_426_473_600, 2 * 3_426_473_600)
    assert spec.shapes["model.embed_tokens.weight"] == spec.shapes["lm_head.weight"] == (32_000, 3_200)
    assert spec.shapes["model.layers.25.mlp.down_proj.weight"] == (3_200, 8_640)
    names = list(spec.shapes)
    attention = [f"self_attn.{letter}_proj" for letter in "qkvo"]
    mlp = [f"mlp.{word}_proj" for word in ("gate", "up", "down")]
    block = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    assert names[:10] == ["model.embed_tokens.weight", *(f"model.layers.0.{name}.weight" for name in block)]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    # The first 100 are the embedding and eleven layers.
    spec = parse("openllama-3b:first-100")
    assert spec.weights == 1_465_414_400
    assert list(spec.shapes)[-1] == "model.layers.10.post_attention_layernorm.weight"


def test_scale_multiplies_the_number_of_weights_and_options_combine_in_any_order() -> None:
    for scale in (0.05, 0.1, 0.3, 1.0):
        spec = parse(f"openllama-3b:scale={scale}")
        with case(scale):
            assert spec.weights == pytest.approx(scale * 3_426_473_600, rel=0.05)
            assert all(size % 64 == 0 for shape in spec.shapes.values() for size in shape)
            assert len(spec.shapes) == 237
    assert OPENLLAMA_3B.scaled(1.0) == OPENLLAMA_3B
    assert parse("openllama-3b:float32:layers=3:first-4") == parse("openllama-3b:first-4:layers=3:float32")
    assert parse("openllama-3b:layers=3:first-4:float32").nbytes == 4 * (32_000 * 3_200 + 3 * 3_200**2)


INVALID = """
: :int8 :first-0 :first-238 :first-100:layers=3 :first=100 :layers=0 :layers=1.5 :layers=1:layers=2 :float16:float32
:scale=nan :scale=-1 :scale=1e9 :scale=100
"""


def test_invalid_spec_is_refused_with_an_example() -> None:
    for spec in ("gpt-5", "", *(f"openllama-3b{options}" for options in INVALID.split())):
        with case(spec), pytest.raises(UsageError) as caught:
            build(spec)
        assert "\n" not in caught.value.message and "openllama-3b:scale=0.1" in str(caught.value.remedy)


def test_size_is_reached_with_fewer_layers_within_15_percent() -> None:
    for megabytes, option in {50: "scale=", 300: "scale=", 700: "layers=1", 2000: "layers=6"}.items():
        spec = spec_of_size(megabytes * 1_000_000)
        assert option in spec and parse(spec).nbytes == pytest.approx(megabytes * 1_000_000, rel=0.15), spec


def test_weights_are_normal_and_norms_are_one_and_values_depend_on_seed_and_position_only() -> None:
    tensors = build(TINY + ":float32", seed=3)
    assert list(tensors) == list(parse(TINY).shapes)
    weights = tensors["model.layers.1.mlp.up_proj.weight"]
    assert weights.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean().item()) < 5 * 0.02 / math.sqrt(weights.numel())
    assert torch.equal(tensors["model.norm.weight"], torch.ones(64))
    whole, again, first, other = build(TINY), build(TINY), build(TINY + ":first-3"), build(TINY, seed=1)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(whole[name], first[name]) for name in first)
    names = [name for name in whole if "norm" not in name]
    assert not any(torch.equal(whole[name], other[name]) for name in names)
    assert not torch.equal(whole[names[1]], whole[names[2]])
    assert whole[names[0]].dtype == torch.bfloat16
