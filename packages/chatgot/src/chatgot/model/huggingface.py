"""Models of Hugging Face transformers: ``config.json`` and tensors in both directions.

A setting of ``config.json`` that changes what the model computes is either supported or refused by its name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec import field
from torch import Tensor

from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.settings import Positive, read_settings
from tensorkeep.errors import CorruptCheckpointError, StateMismatchError, UnsupportedError, UsageError
from tensorkeep.ext import prepared

Document = Mapping[str, Any]
# For each tensor of a `GPT`: its name, the names in transformers of its parts, and whether these are transposed.
TensorNames = Iterator[tuple[str, tuple[str, ...], bool]]
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
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# A message names this many tensors: a wrong file has hundreds.
_MOST_NAMED = 5


def _gpt2_names(config: ModelConfig) -> TensorNames:
    yield "tokens.weight", ("wte.weight",), False
    yield "positions.weight", ("wpe.weight",), False
    for number in range(config.n_layers):
        for theirs, ours, transposed in _GPT2_BLOCK:
            for kind in ("weight", "bias"):
                yield f"blocks.{number}.{ours}.{kind}", (f"h.{number}.{theirs}.{kind}",), transposed
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", (f"ln_f.{kind}",), False


def _llama_names(config: ModelConfig) -> TensorNames:
    kinds = ("weight", "bias") if config.bias else ("weight",)
    yield "tokens.weight", ("embed_tokens.weight",), False
    for number in range(config.n_layers):
        block, layer = f"blocks.{number}", f"layers.{number}"
        # One projection here stacks the rows of several projections there: its letters name them.
        for ours in ("q", "kv") if config.grouped else ("qkv",):
            for kind in kinds:
                theirs = tuple(f"{layer}.self_attn.{each}_proj.{kind}" for each in ours)
                yield f"{block}.attention.{ours}.{kind}", theirs, False
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            yield f"{block}.attention.{norm}.weight", (f"{layer}.self_attn.{norm}.weight",), False
        for their_name, our_name in _LLAMA_BLOCK:
            for kind in ("weight",) if "norm" in our_name else kinds:
                yield f"{block}.{our_name}.{kind}", (f"{layer}.{their_name}.{kind}",), False
    yield "norm.weight", ("norm.weight",), False


@dataclass(frozen=True, slots=True)
class _Family:
    # Before all names but `lm_head`; files of a model without its head have no prefix.
    prefix: str
    # Ends of the names of tensors beside the weights in old files: masks and frequencies, which are recomputed.
    buffers: tuple[str, ...]
    block_names: Callable[[ModelConfig], TensorNames]

    def names(self, config: ModelConfig) -> TensorNames:
        yield from self.block_names(config)
        if not config.tied:
            yield "head.weight", ("lm_head.weight",), False


_GPT2_FAMILY = _Family("transformer.", (".attn.bias", ".attn.masked_bias"), _gpt2_names)
_LLAMA_FAMILY = _Family("model.", (".rotary_emb.inv_freq",), _llama_names)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class in transformers; ``needs`` has the values that fields of a `ModelConfig` may have."""

    name: str
    title: str
    needs: Mapping[str, tuple[object, ...]]
    # Returns `config.json` without the entries that all classes share.
    settings: Callable[[ModelConfig], dict[str, Any]]
    family: _Family

    def obstacles(self, config: ModelConfig) -> list[str]:
        return [
            f"{name}={' or '.join(map(repr, allowed))} (it is {getattr(config, name)!r})"
            for name, allowed in self.needs.items()
            if getattr(config, name) not in allowed
        ]

    def tensors(self, state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        for ours, theirs, transposed in self.family.names(config):
            tensor = state.get(ours)
            if tensor is None:
                # GPT-2 always has biases: a zero for each output, the first dimension of the weight.
                weight = state[f"{ours.removesuffix('bias')}weight"]
                tensor = weight.new_zeros(weight.shape[0])
            # Queries, keys and values are stacked by rows, so `chunk` separates them.
            for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True):
                full_name = name if name == "lm_head.weight" else self.family.prefix + name
                yield full_name, part.T if transposed and part.ndim == 2 else part


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the class in transformers that computes the same model; UnsupportedError names the obstacles."""
    # Obstacles of every class go into the error, so that the user sees the nearest one.
    candidates = [(architecture, architecture.obstacles(config)) for architecture in _ARCHITECTURES]
    for architecture, obstacles in candidates:
        if not obstacles:
            return architecture
    needs = "; ".join(f"{architecture.title} needs {', '.join(obstacles)}" for architecture, obstacles in candidates)
    raise UnsupportedError(
        f"transformers has no architecture for this model: {needs}",
        remedy="train a model with these settings, or use Tensorkeep to run this one",
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


def _llama_settings(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind or "default"}
    if scaling.kind is not None:
        rope["factor"] = float(scaling.factor)
    if scaling.kind == "llama3":
        rope["low_freq_factor"] = float(scaling.low_frequency_factor)
        rope["high_freq_factor"] = float(scaling.high_frequency_factor)
        rope["original_max_position_embeddings"] = scaling.original_context_length
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


_LLAMA_NEEDS: dict[str, tuple[object, ...]] = {
    "positions": ("rotary",),
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
        _GPT2_FAMILY,
    ),
    Architecture("LlamaForCausalLM", "a LLaMA", {"qk_norm": (False,), **_LLAMA_NEEDS}, _llama_settings, _LLAMA_FAMILY),
    Architecture(
        "Qwen3ForCausalLM",
        "a Qwen 3",
        {"qk_norm": (True,), **_LLAMA_NEEDS},
        lambda config: {**_llama_settings(config), "model_type": "qwen3", "use_sliding_window": False},
        _LLAMA_FAMILY,
    ),
)


# Limits far above every model: a damaged number is refused before anything of its size is allocated.
_Layers = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


# Settings by their names in `ModelConfig`; `name` is the name in `config.json`.
class _GPT2(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: _Size
    n_layers: _Layers = field(name="n_layer")
    n_heads: _Size = field(name="n_head")
    d_model: _Size = field(name="n_embd")
    context_length: _Size | None = field(name="n_positions", default=None)
    n_ctx: _Size | None = None  # the name in old files
    d_ff: _Size | None = field(name="n_inner", default=None)
    activation: str = field(name="activation_function", default="gelu_new")
    norm_eps: Positive = field(name="layer_norm_epsilon", default=1e-5)
    tied: bool = field(name="tie_word_embeddings", default=True)
    init_std: Positive = field(name="initializer_range", default=0.02)


class _Llama(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: _Size
    context_length: _Size = field(name="max_position_embeddings")
    n_layers: _Layers = field(name="num_hidden_layers")
    n_heads: _Size = field(name="num_attention_heads")
    d_model: _Size = field(name="hidden_size")
    d_ff: _Size = field(name="intermediate_size")
    head_dim: _Size | None = None
    kv_heads: _Size | None = field(name="num_key_value_heads", default=None)
    bias: bool = field(name="attention_bias", default=False)
    use_sliding_window: bool = True
    sliding_window: _Size | None = None
    rope_base: Positive = field(name="rope_theta", default=10000.0)
    rope_parameters: dict[str, Any] | None = None  # of transformers 5
    old_rope_parameters: dict[str, Any] | None = field(name="rope_scaling", default=None)  # of earlier versions
    norm_eps: Positive = field(name="rms_norm_eps", default=1e-6)
    tied: bool = field(name="tie_word_embeddings", default=False)
    init_std: Positive = field(name="initializer_range", default=0.02)


class _Rope(msgspec.Struct, frozen=True):
    base: Positive | None = field(name="rope_theta", default=None)
    factor: Positive | None = None
    low_frequency_factor: Positive | None = field(name="low_freq_factor", default=None)
    high_frequency_factor: Positive | None = field(name="high_freq_factor", default=None)
    original_context_length: _Size | None = field(name="original_max_position_embeddings", default=None)


S = TypeVar("S", bound=msgspec.Struct)


def read_model_config(document: Document) -> ModelConfig:
    """Return the configuration of the same model.

    UnsupportedError names a setting that `GPT` does not support, CorruptCheckpointError an invalid or missing one.
    """
    kind = document.get("model_type")
    read = _CONFIGS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise UnsupportedError(
            f"model_type is {kind!r}", remedy=f"the types that can be trained are {', '.join(_CONFIGS)}"
        )
    _refuse(document, {"quantization_config": (None,)})
    try:
        return read_settings(read(document), ModelConfig)
    except UsageError as error:
        raise CorruptCheckpointError(f"config.json: {error.message}", remedy=error.remedy) from error


def _settings(document: Document, kind: type[S], prefix: str = "") -> S:
    """Return the settings of a class; CorruptCheckpointError names a setting that is missing or of another type."""
    for each in msgspec.structs.fields(kind):
        if each.required and each.encode_name not in document:
            raise CorruptCheckpointError(f"config.json has no {prefix + each.encode_name!r}")
    try:
        return msgspec.convert(document, prepared(kind))
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise CorruptCheckpointError(
            f"config.json has {prefix}{name} {document.get(name)!r}: {reason[:1].lower()}{reason[1:]}",
            remedy="check the file, or download the model again",
        ) from error


def convert_weights(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a file by their names in `GPT`, in float32; StateMismatchError if they do not match."""
    family = _GPT2_FAMILY if config.positions == "learned" else _LLAMA_FAMILY
    prefix = family.prefix
    # Files of the model without its head have no prefix.
    found = {name if name == "lm_head.weight" else name.removeprefix(prefix): each for name, each in tensors.items()}
    if len(found) < len(tensors):
        twice = f"tensors are stored twice, with {prefix!r} before their names and without it"
        raise StateMismatchError(twice, remedy="remove one copy from the safetensors files")
    found = {name: each for name, each in found.items() if not name.endswith(family.buffers)}
    read: dict[str, Tensor] = {}
    missing: list[str] = []
    unequal: list[str] = []
    for ours, theirs, transposed in family.names(config):
        parts = [found[name] for name in theirs if name in found]
        if len(parts) < len(theirs):
            missing += [name for name in theirs if name not in found]
        # `cat` needs equal columns; a scalar has no dimension to join.
        elif len({part.shape[1:] for part in parts}) > 1 or not all(part.ndim for part in parts):
            unequal += [f"{name} {[*found[name].shape]}" for name in theirs]
        else:
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            read[ours] = (joined.T if transposed and joined.ndim == 2 else joined).float().contiguous()
    used = {name for _, theirs, _ in family.names(config) for name in theirs}
    # A file may store a tied head beside the embedding.
    extra = found.keys() - used - ({"lm_head.weight"} if config.tied else set())
    # On "meta": shapes without memory.
    shapes = {name: parameter.shape for name, parameter in GPT(config, device="meta").named_parameters()}
    unequal = [f"{name} {[*read[name].shape]}" for name in read if read[name].shape != shapes[name]] + unequal
    message, remedy = "the tensors do not match config.json", "check that it and the safetensors files belong together"
    refuse_mismatch(message, remedy, missing=missing, extra=sorted(extra), different=unequal)
    head = found.get("lm_head.weight") if config.tied else None
    if head is not None and not torch.equal(head.float(), read["tokens.weight"]):
        # Some versions of transformers use the embedding, other versions the head.
        raise StateMismatchError(
            "config.json has tie_word_embeddings true, and lm_head.weight differs from the embedding of the tokens",
            remedy='write "tie_word_embeddings": false into config.json to use that head, or remove lm_head.weight',
            different=("lm_head.weight",),
        )
    return read


def refuse_mismatch(
    message: str, remedy: str, *, missing: Iterable[str], extra: Iterable[str], different: Iterable[str]
) -> None:
    """Raise StateMismatchError, which names the first tensors of each list, if a list is not empty."""
    lists = {"missing": tuple(missing), "not of the model": tuple(extra), "of another shape": tuple(different)}
    named = []
    for what, names in lists.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        named += [f"{what}: {', '.join(names[:_MOST_NAMED])}{more}"] if names else []
    if named:
        absent, additional, reshaped = lists.values()
        text = f"{message}: {'; '.join(named)}"
        raise StateMismatchError(text, remedy=remedy, missing=absent, extra=additional, different=reshaped)


def _refuse(document: Document, allowed: Mapping[str, tuple[object, ...]], prefix: str = "") -> None:
    for name, values in allowed.items():
        # An absent setting counts as the first value.
        if document.get(name, values[0]) not in values:
            raise UnsupportedError(
                f"config.json has {prefix}{name} {document[name]!r}, which is not supported",
                remedy=f"give a model with {' or '.join(map(repr, values))}",
            )


def _gpt2(document: Document) -> dict[str, Any]:
    allowed = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "activation_function": (*_GPT2_ACTIVATIONS,),
    }
    _refuse(document, allowed)
    found = _settings(document, _GPT2)
    context = found.context_length or found.n_ctx
    if context is None:
        raise CorruptCheckpointError("config.json has no 'n_positions'")
    _check_multiple(document, "n_embd", "n_head")
    activation = _GPT2_ACTIVATIONS[found.activation]
    return {**_of_model(found), "context_length": context, "activation": activation, "bias": True}


def _llama(document: Document) -> dict[str, Any]:
    found = _settings(document, _Llama)
    window = found.sliding_window
    # A sliding window as long as the context hides nothing.
    whole = not found.use_sliding_window or window is None or window >= found.context_length
    allowed = {
        "hidden_act": ("silu",),
        # `bias` here is one setting for both, so they must be equal there.
        "mlp_bias": (found.bias,),
        "attention_bias": (document.get("mlp_bias", False),),
        "partial_rotary_factor": (None, 1),
        "sliding_window": (window if whole else None,),
        "layer_types": (None, ["full_attention"] * found.n_layers),
    }
    _refuse(document, allowed)
    if found.head_dim is None:
        _check_multiple(document, "hidden_size", "num_attention_heads")
    # Old files of models with one key head for each query head have no number of key heads.
    kv_heads = None if found.kv_heads == found.n_heads else found.kv_heads
    if kv_heads is not None:
        _check_multiple(document, "num_attention_heads", "num_key_value_heads")
    kind = {"kv_heads": kv_heads, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
    return {**_of_model(found), **kind, **_rope(found)}


def _of_model(found: msgspec.Struct) -> dict[str, Any]:
    settings = msgspec.structs.asdict(found)
    return {name: value for name, value in settings.items() if name in ModelConfig.__struct_fields__}


def _check_multiple(document: Document, name: str, divisor: str) -> None:
    if document[name] % document[divisor]:
        raise CorruptCheckpointError(
            f"config.json has {name} {document[name]}, which is not a multiple of {divisor} {document[divisor]}"
        )


def _rope(model: _Llama) -> dict[str, Any]:
    """Return the settings of rotary positions; like transformers, prefer ``rope_scaling`` to ``rope_parameters``."""
    name = "rope_scaling" if model.old_rope_parameters else "rope_parameters"
    rope = model.old_rope_parameters or model.rope_parameters or {}
    _refuse(rope, {"partial_rotary_factor": (None, 1)}, f"{name}.")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedError(
            f"config.json has {name} of several kinds of layers, which are not supported",
            remedy="give a model with the same positions in all layers",
        )
    found = _settings(rope, _Rope, f"{name}.")
    base = found.base or model.rope_base
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_base": base}
    _refuse({"rope_type": kind}, {"rope_type": ("default", "linear", "llama3")})
    scaling = {"kind": kind}
    for each in msgspec.structs.fields(_Rope)[1 : 2 if kind == "linear" else None]:
        scaling[each.name] = getattr(found, each.name)
        if scaling[each.name] is None:
            raise CorruptCheckpointError(f"config.json has no '{name}.{each.encode_name}'")
    return {"rope_base": base, "rope_scaling": scaling}


_CONFIGS: dict[str, Callable[[Document], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    # Absent settings have the defaults of transformers.
    "mistral": lambda document: _llama({"sliding_window": 4096, "num_key_value_heads": 8, **document}),
    "qwen3": lambda document: {**_llama({"head_dim": 128, "use_sliding_window": False, **document}), "qk_norm": True},
}
