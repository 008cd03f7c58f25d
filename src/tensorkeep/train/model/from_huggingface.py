"""Reading models of Hugging Face transformers: what their ``config.json`` states, and their tensors by our names.

A setting that changes what the model computes is either supported or refused by its name; see
`tensorkeep.train.model.huggingface` for the way back.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tensorkeep.errors import CorruptCheckpointError, StateMismatchError, UnsupportedError
from tensorkeep.train.config.sections import read_settings
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.model.huggingface import GPT2_BLOCK, LLAMA_BLOCK

Document = Mapping[str, Any]

_MOST_NAMED = 5
_GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Masks, which old files have beside the weights."""


def model_config(document: Document) -> ModelConfig:
    """Return the configuration of the same model.

    Raises UnsupportedError if it is not a GPT-2, LLaMA, Mistral or Qwen 3, or has a setting that `GPT` has not; the
    message names it. CorruptCheckpointError if a setting is missing or has no valid value.
    """
    kind = document.get("model_type")
    read = _CONFIGS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise UnsupportedError(
            f"model_type is {kind!r}", remedy=f"the types that can be trained are {', '.join(_CONFIGS)}"
        )
    try:
        return read_settings(read(document), ModelConfig)
    except KeyError as error:
        raise CorruptCheckpointError(f"config.json has no {error.args[0]!r}") from error


def weights_of(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors by their names in `GPT`, in float32.

    Raises StateMismatchError if tensors are missing or left over, or have other shapes than the configuration states.
    """
    learned = config.positions == "learned"
    prefix = "transformer." if learned else "model."
    # Files of the model without its head have no prefix.
    found = {name if name == "lm_head.weight" else name.removeprefix(prefix): each for name, each in tensors.items()}
    found = {name: each for name, each in found.items() if not (learned and name.endswith(_GPT2_BUFFERS))}
    read: dict[str, Tensor] = {}
    missing: list[str] = []
    for ours, theirs, transposed in _names(config):
        absent = [name for name in theirs if name not in found]
        if absent:
            missing += absent
            continue
        parts = [found[name] for name in theirs]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        read[ours] = (joined.T if transposed and joined.ndim == 2 else joined).float().contiguous()
    used = {name for _, theirs, _ in _names(config) for name in theirs}
    # A tied head may be stored, too.
    extra = found.keys() - used - ({"lm_head.weight"} if config.tied else set())
    _check(config, read, tuple(missing), tuple(sorted(extra)))
    return read


def _check(config: ModelConfig, read: Mapping[str, Tensor], missing: tuple[str, ...], extra: tuple[str, ...]) -> None:
    shapes = {name: parameter.shape for name, parameter in GPT(config, device="meta").named_parameters()}
    different = tuple(f"{name} {[*read[name].shape]}" for name in read if read[name].shape != shapes[name])
    if not (missing or extra or different):
        return
    parts = {"missing": missing, "not of the model": extra, "of another shape": different}
    raise StateMismatchError(
        "the tensors are not those that config.json describes: "
        + "; ".join(f"{what}: {', '.join(names[:_MOST_NAMED])}" for what, names in parts.items() if names),
        remedy="check that config.json and the safetensors files belong together",
        missing=missing,
        extra=extra,
        different=different,
    )


def _names(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield the name here, the names there of the parts that it consists of, and whether these are transposed."""
    yield from _gpt2_names(config) if config.positions == "learned" else _llama_names(config)
    if not config.tied:
        yield "head.weight", ("lm_head.weight",), False


def _gpt2_names(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    yield "tokens.weight", ("wte.weight",), False
    yield "positions.weight", ("wpe.weight",), False
    for number in range(config.n_layers):
        for theirs, ours, transposed in GPT2_BLOCK:
            for kind in ("weight", "bias"):
                yield f"blocks.{number}.{ours}.{kind}", (f"h.{number}.{theirs}.{kind}",), transposed
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", (f"ln_f.{kind}",), False


def _llama_names(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    kinds = ("weight", "bias") if config.bias else ("weight",)
    projections = {"q": "q", "kv": "kv"} if config.grouped else {"qkv": "qkv"}
    yield "tokens.weight", ("embed_tokens.weight",), False
    for number in range(config.n_layers):
        block, layer = f"blocks.{number}", f"layers.{number}"
        for ours in projections:
            for kind in kinds:
                theirs = tuple(f"{layer}.self_attn.{each}_proj.{kind}" for each in ours)
                yield f"{block}.attention.{ours}.{kind}", theirs, False
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            yield f"{block}.attention.{norm}.weight", (f"{layer}.self_attn.{norm}.weight",), False
        for their_name, our_name in LLAMA_BLOCK:
            for kind in ("weight",) if "norm" in our_name else kinds:
                yield f"{block}.{our_name}.{kind}", (f"{layer}.{their_name}.{kind}",), False
    yield "norm.weight", ("norm.weight",), False


def _refuse(document: Document, allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise UnsupportedError if a setting has a value that is not among the first ones; an absent one is the first."""
    for name, values in allowed.items():
        if document.get(name, values[0]) not in values:
            raise UnsupportedError(
                f"config.json has {name} {document[name]!r}, which is not supported",
                remedy=f"give a model with {' or '.join(map(repr, values))}",
            )


def _gpt2(document: Document) -> dict[str, Any]:
    _refuse(
        document,
        {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "activation_function": ("gelu_new", *_GPT2_ACTIVATIONS),
        },
    )
    return {
        "vocab_size": document["vocab_size"],
        "context_length": document.get("n_positions") or document["n_ctx"],
        "n_layers": document["n_layer"],
        "n_heads": document["n_head"],
        "d_model": document["n_embd"],
        "d_ff": document.get("n_inner"),
        "norm_eps": document.get("layer_norm_epsilon", 1e-5),
        "activation": _GPT2_ACTIVATIONS[document.get("activation_function", "gelu_new")],
        "bias": True,
        "tied": document.get("tie_word_embeddings", True),
        "init_std": document.get("initializer_range", 0.02),
    }


def _llama(document: Document) -> dict[str, Any]:
    heads, width = document["num_attention_heads"], document["hidden_size"]
    biases = bool(document.get("attention_bias", False))
    unused_window = not document.get("use_sliding_window", True)
    _refuse(
        document,
        {
            "hidden_act": ("silu",),
            "mlp_bias": (biases,),
            "head_dim": (width // heads, None),
            "sliding_window": (document.get("sliding_window") if unused_window else None,),
            "layer_types": (None, ["full_attention"] * document["num_hidden_layers"]),
        },
    )
    key_heads = document.get("num_key_value_heads") or heads
    return {
        "vocab_size": document["vocab_size"],
        "context_length": document["max_position_embeddings"],
        "n_layers": document["num_hidden_layers"],
        "n_heads": heads,
        "d_model": width,
        "kv_heads": None if key_heads == heads else key_heads,
        "d_ff": document["intermediate_size"],
        "positions": "rotary",
        **_rope(document),
        "norm": "rmsnorm",
        "norm_eps": document.get("rms_norm_eps", 1e-6),
        "activation": "swiglu",
        "bias": biases,
        "tied": document.get("tie_word_embeddings", False),
        "init_std": document.get("initializer_range", 0.02),
    }


def _rope(document: Document) -> dict[str, Any]:
    """Return the settings of rotary positions: transformers 5 states them together, earlier versions in two entries."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    base = rope.get("rope_theta", document.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_base": base}
    if kind not in ("linear", "llama3"):
        raise UnsupportedError(
            f"config.json has rope_type {kind!r}, which is not supported",
            remedy="give a model with 'default', 'linear' or 'llama3'",
        )
    scaling = {"kind": kind, "factor": rope["factor"]}
    if kind == "llama3":
        scaling |= {
            "low_frequency_factor": rope["low_freq_factor"],
            "high_frequency_factor": rope["high_freq_factor"],
            "original_context_length": rope["original_max_position_embeddings"],
        }
    return {"rope_base": base, "rope_scaling": scaling}


_CONFIGS: dict[str, Callable[[Document], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen3": lambda document: {**_llama(document), "qk_norm": True},
}
