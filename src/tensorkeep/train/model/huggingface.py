"""Models of Hugging Face transformers: class, configuration, and mapping of tensor names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensorkeep.errors import UnsupportedError
from tensorkeep.train.model.config import ModelConfig

GPT2_BLOCK = (
    # name in transformers, name here, whether transformers stores it as [inputs, outputs]
    ("ln_1", "norm1", False),
    ("attn.c_attn", "attention.qkv", True),
    ("attn.c_proj", "attention.out", True),
    ("ln_2", "norm2", False),
    ("mlp.c_fc", "mlp.up", True),
    ("mlp.c_proj", "mlp.down", True),
)
LLAMA_BLOCK = (
    ("input_layernorm", "norm1"),
    ("self_attn.o_proj", "attention.out"),
    ("post_attention_layernorm", "norm2"),
    ("mlp.gate_proj", "mlp.gate"),
    ("mlp.up_proj", "mlp.up"),
    ("mlp.down_proj", "mlp.down"),
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class in transformers, and its common name.

    ``needs`` holds the values that the fields of a `ModelConfig` may have. ``settings`` returns its ``config.json``,
    without the entries that all classes share; ``tensors`` yields its names and tensors, made from those of a `GPT`.
    """

    name: str
    title: str
    needs: Mapping[str, tuple[object, ...]]
    settings: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[Mapping[str, Tensor], ModelConfig], Iterator[tuple[str, Tensor]]]

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Return the settings that would have to differ."""
        return [
            f"{field}={' or '.join(map(repr, allowed))} (it is {getattr(config, field)!r})"
            for field, allowed in self.needs.items()
            if getattr(config, field) not in allowed
        ]


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the class in transformers that computes the same model.

    Raises UnsupportedError if transformers has no such model; the message names the settings that prevent it.
    """
    candidates = [(architecture, architecture.obstacles(config)) for architecture in _ARCHITECTURES]
    for architecture, obstacles in candidates:
        if not obstacles:
            return architecture
    needs = "; ".join(f"{architecture.title} needs {', '.join(obstacles)}" for architecture, obstacles in candidates)
    raise UnsupportedError(
        f"transformers has no architecture for this model: {needs}",
        remedy="train a model with the settings of one of them, or use Tensorkeep to run this one",
    )


def _gpt2_settings(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_positions": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.mlp_width,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
        "layer_norm_epsilon": float(config.norm_eps),
        "embd_pdrop": float(config.dropout),
        "attn_pdrop": float(config.dropout),
        "resid_pdrop": float(config.dropout),
    }


def _gpt2_tensors(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    yield "transformer.wte.weight", state["tokens.weight"]
    yield "transformer.wpe.weight", state["positions.weight"]
    layers = [
        (f"transformer.h.{number}.{theirs}", f"blocks.{number}.{ours}", transposed)
        for number in range(config.n_layers)
        for theirs, ours, transposed in GPT2_BLOCK
    ]
    for theirs, ours, transposed in (*layers, ("transformer.ln_f", "norm", False)):
        weight = state[f"{ours}.weight"]
        yield f"{theirs}.weight", weight.T if transposed else weight
        # GPT-2 always has biases.
        bias = state.get(f"{ours}.bias")
        yield f"{theirs}.bias", weight.new_zeros(weight.shape[0]) if bias is None else bias
    if not config.tied:
        yield "lm_head.weight", state["head.weight"]


def _llama_settings(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind or "default"}
    if scaling.kind is not None:
        rope["factor"] = float(scaling.factor)
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": float(scaling.low_frequency_factor),
            "high_freq_factor": float(scaling.high_frequency_factor),
            "original_max_position_embeddings": scaling.original_context_length,
        }
    return {
        "model_type": "llama",
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": float(config.norm_eps),
        # transformers before 5, and other libraries, read the first two; transformers 5 reads the third.
        "rope_theta": float(config.rope_base),
        "rope_scaling": None if scaling.kind is None else rope,
        "rope_parameters": {**rope, "rope_theta": float(config.rope_base)},
        "attention_dropout": float(config.dropout),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _llama_tensors(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", state["tokens.weight"]
    for number in range(config.n_layers):
        block, layer = f"blocks.{number}", f"model.layers.{number}"
        if config.grouped:
            keys_and_values = state[f"{block}.attention.kv.weight"].chunk(2)
            projections: tuple[Tensor, ...] = (state[f"{block}.attention.q.weight"], *keys_and_values)
        else:
            projections = state[f"{block}.attention.qkv.weight"].chunk(3)
        for name, projection in zip("qkv", projections, strict=True):
            yield f"{layer}.self_attn.{name}_proj.weight", projection
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            yield f"{layer}.self_attn.{norm}.weight", state[f"{block}.attention.{norm}.weight"]
        for their_name, our_name in LLAMA_BLOCK:
            yield f"{layer}.{their_name}.weight", state[f"{block}.{our_name}.weight"]
    yield "model.norm.weight", state["norm.weight"]
    if not config.tied:
        yield "lm_head.weight", state["head.weight"]


_LLAMA_NEEDS: dict[str, tuple[object, ...]] = {
    "token_shift": (False,),
    "convolution": (1,),
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "bias": (False,),
}

_ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        "a GPT-2",
        {
            "positions": ("learned",),
            "head_dim": (None,),
            "kv_heads": (None,),
            "qk_norm": (False,),
            "token_shift": (False,),
            "convolution": (1,),
            "norm": ("layernorm",),
            "activation": ("gelu", "gelu_tanh"),
        },
        _gpt2_settings,
        _gpt2_tensors,
    ),
    Architecture(
        "LlamaForCausalLM",
        "a LLaMA",
        {
            "positions": ("rotary",),
            "qk_norm": (False,),
            **_LLAMA_NEEDS,
        },
        _llama_settings,
        _llama_tensors,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "a Qwen 3",
        {
            "positions": ("rotary",),
            "qk_norm": (True,),
            **_LLAMA_NEEDS,
        },
        lambda config: {**_llama_settings(config), "model_type": "qwen3", "use_sliding_window": False},
        _llama_tensors,
    ),
)
