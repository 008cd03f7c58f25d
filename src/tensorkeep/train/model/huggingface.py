"""Models of Hugging Face transformers: class, configuration, and mapping of tensor names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensorkeep.errors import UnsupportedError
from tensorkeep.train.model.config import ModelConfig

_GPT2_BLOCK = (
    # name in transformers, name here, whether transformers stores it as [inputs, outputs]
    ("ln_1", "norm1", False),
    ("attn.c_attn", "attention.qkv", True),
    ("attn.c_proj", "attention.out", True),
    ("ln_2", "norm2", False),
    ("mlp.c_fc", "mlp.up", True),
    ("mlp.c_proj", "mlp.down", True),
)
_LLAMA_BLOCK = (
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
        for theirs, ours, transposed in _GPT2_BLOCK
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
    return {
        "model_type": "llama",
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": float(config.norm_eps),
        # transformers before 5, and other libraries, read the first; transformers 5 reads the second.
        "rope_theta": float(config.rope_base),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.rope_base)},
        "attention_dropout": float(config.dropout),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _llama_tensors(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", state["tokens.weight"]
    for number in range(config.n_layers):
        block, layer = f"blocks.{number}", f"model.layers.{number}"
        for name, projection in zip("qkv", state[f"{block}.attention.qkv.weight"].chunk(3), strict=True):
            yield f"{layer}.self_attn.{name}_proj.weight", projection
        for their_name, our_name in _LLAMA_BLOCK:
            yield f"{layer}.{their_name}.weight", state[f"{block}.{our_name}.weight"]
    yield "model.norm.weight", state["norm.weight"]
    if not config.tied:
        yield "lm_head.weight", state["head.weight"]


_ARCHITECTURES = (
    Architecture(
        "GPT2LMHeadModel",
        "a GPT-2",
        {
            "positions": ("learned",),
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
            "token_shift": (False,),
            "convolution": (1,),
            "norm": ("rmsnorm",),
            "activation": ("swiglu",),
            "bias": (False,),
        },
        _llama_settings,
        _llama_tensors,
    ),
)
