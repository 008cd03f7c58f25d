"""Models of transformers that become ours: the same logits, every setting read or refused, and the way back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.export import export
from chatgot.model.config import ModelConfig, RopeScaling
from chatgot.model.gpt import GPT
from chatgot.model.huggingface import convert_weights, read_model_config
from chatgot.run.weights import read_initial
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, StateMismatchError, UnsupportedError
from tensorkeep.testing.cases import case

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 40}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT2 = {"n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
GPT2_DOCUMENT = {"model_type": "gpt2", "vocab_size": 9, **GPT2}
LLAMA = {"max_position_embeddings": 16, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"intermediate_size": 20}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, gelu, untied": ("GPT2", GPT2 | {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 20}),
    "llama": ("Llama", {**LLAMA, "rope_theta": 300.0, "num_key_value_heads": 4}),
    "llama, grouped, tied": ("Llama", {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama, biases": ("Llama", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {**LLAMA, "num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**LLAMA, "num_key_value_heads": 2, "sliding_window": None, "head_dim": 6}),
    "qwen 3": ("Qwen3", {**LLAMA, "num_key_value_heads": 2, "head_dim": 10}),
    "qwen 3, narrow": ("Qwen3", {**LLAMA, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 4}),
}


def made(transformers: Any, name: str, **saving: Any) -> Any:
    """Return a model of transformers in which every weight matters, saved in a folder if there is one."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(vocab_size=19, bos_token_id=0, eos_token_id=0, **settings)
    class_name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, class_name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    if saving:
        model.save_pretrained(**saving)
    return model


# The import of transformers takes seconds, and starts a process: one worker runs all tests that need it.
with_transformers = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=with_transformers) for name in MODELS])
def test_logits_are_those_of_transformers(transformers: Any, tmp_path: Path, name: str) -> None:
    theirs = made(transformers, name, save_directory=tmp_path / "theirs")
    initial = read_initial(tmp_path / "theirs")
    ours = GPT(initial.config, values=initial.tensors).eval()
    tokens = torch.randint(19, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert initial.record.kind == "hugging-face"
    assert len(initial.record.fingerprint) == 16


@pytest.mark.integration
@pytest.mark.xdist_group("transformers")
def test_shards_are_read_by_their_index(transformers: Any, tmp_path: Path) -> None:
    made(transformers, "gpt2", save_directory=tmp_path / "whole")
    made(transformers, "gpt2", save_directory=tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    whole, shards = (read_initial(tmp_path / name) for name in ("whole", "shards"))
    assert whole.record.fingerprint == shards.record.fingerprint


ROTARY = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
TINY = ModelConfig(vocab_size=9, context_length=8, n_layers=1, n_heads=1, d_model=4, bias=True)


def test_names_without_a_prefix_and_stored_masks_are_accepted() -> None:
    shapes = {"wte.weight": (9, 4), "wpe.weight": (8, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
    shapes |= {f"h.0.{norm}.{kind}": (4,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    layers = {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    for layer, shape in layers.items():
        shapes |= {f"h.0.{layer}.weight": shape, f"h.0.{layer}.bias": shape[1:]}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    # A tied head may be stored, too, if it is the embedding; and each tensor once.
    tensors["lm_head.weight"] = tensors["wte.weight"].double()
    weights = convert_weights(tensors, TINY)
    for extra, message in (
        ({"lm_head.weight": tensors["wte.weight"] + 1}, "tie_word_embeddings true, and lm_head.weight differs"),
        ({"lm_head.weight": tensors["wte.weight"][:8]}, "tie_word_embeddings true, and lm_head.weight differs"),
        ({"transformer.wpe.weight": tensors["wpe.weight"] + 1}, "stored twice, with 'transformer.' before"),
    ):
        with case(message), pytest.raises(StateMismatchError, match=message) as caught:
            convert_weights(tensors | extra, TINY)
        assert caught.value.remedy
    assert torch.equal(weights["blocks.0.mlp.up.weight"], tensors["h.0.mlp.c_fc.weight"].T)
    assert set(weights) == {name for name, _ in GPT(TINY, device="meta").named_parameters()}


def test_missing_foreign_and_misshapen_tensors_are_named() -> None:
    tensors = {"transformer.wte.weight": torch.zeros(9, 5), "transformer.h.0.adapter": torch.zeros(1)}
    with pytest.raises(StateMismatchError) as caught:
        convert_weights(tensors, TINY)
    assert "wpe.weight" in caught.value.missing
    assert caught.value.extra == ("h.0.adapter",)
    assert caught.value.different == ("tokens.weight [9, 5]",)
    # Projections that cannot be joined.
    tensors = {f"model.layers.0.self_attn.{each}_proj.weight": torch.zeros(24, 24) for each in "qkv"}
    for shape in ([24, 20], [24], []):
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(shape)
        with case(shape), pytest.raises(StateMismatchError) as caught:
            convert_weights(tensors, read_model_config(llama()))
        assert f"layers.0.self_attn.k_proj.weight {shape}" in caught.value.different


@pytest.mark.parametrize(
    "parts",
    [{}, *({**ROTARY, "kv_heads": 1, **more} for more in ({}, {"head_dim": 6}, {"head_dim": 2, "qk_norm": True}))],
)
def test_exported_model_comes_back_bit_for_bit(tmp_path: Path, parts: dict[str, Any]) -> None:
    config = ModelConfig(vocab_size=9, context_length=8, n_layers=2, n_heads=2, d_model=8, bias=not parts, **parts)
    model = GPT(config)
    export(model, config, tmp_path / "out")
    initial = read_initial(tmp_path / "out")
    assert (initial.config.mlp_width, initial.config.head_dim) == (config.mlp_width, config.head_dim)
    for name, parameter in model.named_parameters():
        assert torch.equal(initial.tensors[name], parameter), name


def llama(**settings: Any) -> dict[str, Any]:
    return {"model_type": "llama", "vocab_size": 9, **LLAMA, **settings}


ROPES = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'"),
        ({"model_type": ["gpt2"]}, r"model_type is \['gpt2'\]"),
        (llama(hidden_act="relu"), "hidden_act 'relu', which is not supported"),
        (llama(quantization_config={"bits": 4}), "quantization_config {'bits': 4}, which is not supported"),
        (llama(rope_scaling={"partial_rotary_factor": 0.5}), "rope_scaling.partial_rotary_factor 0.5"),
        ({**llama(), "model_type": "mistral", "max_position_embeddings": 4097}, "sliding_window 4096"),
        (llama(attention_bias=True, mlp_bias=False), "mlp_bias False, which is not supported"),
        (llama(attention_bias=True), "attention_bias True, which is not supported"),
        (llama(mlp_bias=True), "mlp_bias True, which is not supported"),
        (llama(sliding_window=4), "sliding_window 4, which is not supported"),
        (llama(rope_scaling={"type": "yarn", "factor": 2.0}), "rope_type 'yarn', which is not supported"),
        (llama(rope_parameters=ROPES), "rope_parameters of several kinds of layers"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function 'relu', which is not supported"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ],
)
def test_settings_that_change_the_model_are_refused_by_name(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_model_config(document)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (llama(num_attention_heads=0), "num_attention_heads 0: expected `int` >= 1"),
        (llama(num_attention_heads="4"), "num_attention_heads '4': expected `int`, got `str`"),
        (llama(num_attention_heads=None), "num_attention_heads None: expected `int`, got `null`"),
        (llama(num_attention_heads=5), "hidden_size 24, which is not a multiple of num_attention_heads 5"),
        (llama(num_key_value_heads=3), "num_attention_heads 4, which is not a multiple of num_key_value_heads 3"),
        (llama(num_hidden_layers="2"), "num_hidden_layers '2': expected `int`, got `str`"),
        (llama(num_hidden_layers=2.0), "num_hidden_layers 2.0: expected `int`, got `float`"),
        (llama(num_hidden_layers=None), "num_hidden_layers None"),
        (llama(num_hidden_layers=10**9), "num_hidden_layers 1000000000: expected `int` <= 16384"),
        (llama(hidden_size=10**30), "hidden_size 10+: expected `int` <= 16777216"),
        (llama(rope_parameters="default"), r"rope_parameters 'default': expected `object \| null`, got `str`"),
        (llama(rope_scaling=[2.0]), r"rope_scaling \[2.0\]: expected `object \| null`, got `array`"),
        (llama(rope_parameters={"rope_theta": "x"}), "rope_parameters.rope_theta 'x': expected `float \\| null`"),
        (llama(rope_scaling={"type": "linear"}), "has no 'rope_scaling.factor'"),
        (llama(rope_scaling={**LLAMA3, "high_freq_factor": 0.5}), "config.json: rope_scaling.high_frequency_factor is"),
        ({**GPT2_DOCUMENT, "n_head": 5}, "n_embd 12, which is not a multiple of n_head 5"),
        ({**GPT2_DOCUMENT, "n_positions": None}, "has no 'n_positions'"),
        ({"model_type": "gpt2", "vocab_size": 9, "n_layer": 1, "n_head": 1}, "has no 'n_embd'"),
    ],
)
def test_malformed_settings_are_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        read_model_config(document)


def test_rope_of_earlier_versions_is_read() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    config = read_model_config(llama(rope_theta=500.0, rope_scaling=scaling))
    assert config.rope_base == 500.0
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_context_length=40)
    both = llama(rope_scaling={"type": "linear", "factor": 2}, rope_parameters=LLAMA3)
    for document in (both, both | {"rope_parameters": None}):
        config = read_model_config(document)
        assert (config.rope_scaling.kind, config.rope_scaling.factor, config.rope_base) == ("linear", 2.0, 1e4)
    # Qwen 3 has its window off by default.
    assert read_model_config(llama(sliding_window=4) | {"model_type": "qwen3"}).head_size == 128


def test_folders_without_a_usable_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="neither a run nor a Hugging Face model"):
        read_initial(tmp_path)
    for content in (b"[1]", b'{"model_type": "\xff"}', b'{"a":' * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with case(content[:20]), pytest.raises(CorruptCheckpointError, match="not a JSON object"):
            read_initial(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(NotACheckpointError, match=r"has none of model\.safetensors") as caught:
        read_initial(tmp_path)
    assert "safe_serialization" in str(caught.value.remedy)
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(CorruptCheckpointError, match="has no 'vocab_size'"):
        read_initial(tmp_path)
