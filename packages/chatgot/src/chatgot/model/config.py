"""The configuration of a model, and what follows from it: parameters and FLOPs."""

import math
from typing import ClassVar, Literal, Self

import msgspec

from chatgot.settings import Count, Decay, Positive, Section, Steps
from tensorkeep.errors import UsageError

Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu"]
# Activations that multiply two projections of the input (Shazeer, arXiv 2002.05202).
GATED = ("swiglu", "geglu")


class RopeScaling(Section, frozen=True):
    """How the angles of rotary positions are changed for a context longer than in the first training."""

    # None for no change; ``"linear"``: all angles are divided by the factor (Chen et al., arXiv 2306.15595);
    # ``"llama3"``: only angles with long wavelengths, as in LLaMA 3.1 (Grattafiori et al., arXiv 2407.21783).
    kind: Literal["linear", "llama3"] | None = None
    # The divisor of the angles.
    factor: Positive = 1.0
    # For ``"llama3"``: angles that turn at most ``low_frequency_factor`` times within the original context are divided
    # by the factor, angles that turn at least ``high_frequency_factor`` times are unchanged, and in between the
    # division is interpolated.
    low_frequency_factor: Positive = 1.0
    high_frequency_factor: Positive = 4.0
    # For ``"llama3"``: the context of the first training.
    original_context_length: Count = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise UsageError(
                f"rope_scaling.high_frequency_factor is {self.high_frequency_factor:g}",
                remedy=f"give a number above low_frequency_factor, {self.low_frequency_factor:g}",
            )


class LoraConfig(Section, frozen=True):
    """Adapters of low rank beside frozen weights; see `chatgot.model.layers.LoraLinear`."""

    # The rank of the adapters; 0 for none.
    rank: Steps = 0
    # The output of the adapters is multiplied by alpha / rank.
    alpha: Positive = 16.0
    # The layers that have an adapter: ``"attention"``, ``"mlp"``, or ``"all"``.
    targets: Literal["all", "attention", "mlp"] = "all"

    def adapts(self, part: str) -> bool:
        return self.rank > 0 and self.targets in ("all", part)


class ModelConfig(Section, frozen=True):
    """The architecture of a `GPT`.

    Attributes
    ----------
    vocab_size : int
        Rows of the token embedding and of the head.
    vocab_multiple : int
        Opening a run rounds ``vocab_size`` up to a multiple of this: matmuls of a multiple of 128 are faster on a GPU.
    vocab_padding : int
        The number of last rows without a token; opening a run sets it. They are not part of the loss, are never drawn,
        and are not exported.
    context_length : int
        The largest number of tokens that the model attends to.
    n_layers, n_heads, d_model : int
        Blocks, attention heads in a block, and the width of the residual stream: without ``head_dim`` a multiple of
        ``n_heads``.
    head_dim : int, optional
        The width of one attention head, as in Qwen 3. By default ``d_model / n_heads``.
    kv_heads : int, optional
        Key and value heads, a divisor of ``n_heads``: each serves a group of consecutive query heads (Ainslie et al.,
        arXiv 2305.13245). By default as many as ``n_heads``.
    qk_norm : bool
        Whether each head's queries and keys are normalised by an RMSNorm (Henry et al., arXiv 2010.04245; with learned
        weights, as in Qwen 3), before they are rotated.
    d_ff : int, optional
        Width of the hidden layer of the MLPs. The default is 4 d_model; for gated activations it is 8/3 d_model,
        rounded up to a multiple of 8, so that both have about the same number of parameters; see `mlp_width`.
    positions : str
        ``"learned"``: an embedding of the position is added to the token embedding (GPT-2); ``"rotary"``: queries and
        keys are rotated by an angle proportional to their position (Su et al., arXiv 2104.09864), which needs an even
        head size.
    rope_base : float
        Rotary positions have wavelengths from 2 pi to almost 2 pi times the base, in tokens.
    rope_scaling : RopeScaling
        The scaling of rotary positions.
    token_shift : bool or str
        Whether a learned fraction of the previous token's embedding is added to each embedding; with ``"blocks"``, the
        same is done with the input of every attention and MLP as well; see `TokenShift`.
    convolution : int
        The width in positions of a causal depthwise convolution over queries, keys and values; 1 for none; see
        `CausalConvolution`. Not with ``kv_heads``.
    norm : str
        ``"layernorm"`` or ``"rmsnorm"`` (Zhang and Sennrich, arXiv 1910.07467).
    norm_eps : float
        The number added to the variance, or to the mean square.
    activation : str
        ``"gelu"``, ``"gelu_tanh"`` (its approximation, as in GPT-2), ``"relu2"`` (So et al., arXiv 2109.08668),
        ``"swiglu"`` or ``"geglu"``.
    bias : bool
        Whether the linear layers of the blocks and the LayerNorms have biases. The head and RMSNorm never have one.
    tied : bool
        Whether the head shares the weights of the token embedding.
    dropout : float
        Probability that an element is zeroed in training: of the embeddings, of the attention weights, and of the
        outputs of attention and MLPs.
    lora : LoraConfig
        Adapters; with adapters, the other weights are frozen. The technique ``lora`` sets it.
    init_std : float
        Standard deviation of the initial weights.

    Raises
    ------
    UsageError
        If a value is out of bounds, ``d_model`` is not a multiple of ``n_heads`` and no ``head_dim`` is given, or
        ``n_heads`` is not a multiple of ``kv_heads``.

    Examples
    --------
    >>> config = ModelConfig(vocab_size=65, context_length=64, n_layers=4, n_heads=4, d_model=128)
    >>> config.head_size, config.mlp_width, config.parameter_count()
    (32, 512, 804096)
    """

    aliases: ClassVar = {
        "n_layer": "n_layers",
        "num_layers": "n_layers",
        "num_hidden_layers": "n_layers",
        "n_head": "n_heads",
        "num_heads": "n_heads",
        "num_attention_heads": "n_heads",
        "n_embd": "d_model",
        "hidden_size": "d_model",
        "embed_dim": "d_model",
        "d_hid": "d_ff",
        "intermediate_size": "d_ff",
        "ffn_dim": "d_ff",
        "block_size": "context_length",
        "seq_len": "context_length",
        "seq_length": "context_length",
        "sequence_length": "context_length",
        "max_seq_len": "context_length",
    }

    vocab_size: Count
    context_length: Count
    n_layers: Count
    n_heads: Count
    d_model: Count
    head_dim: Count | None = None
    kv_heads: Count | None = None
    qk_norm: bool = False
    d_ff: Count | None = None
    positions: Literal["learned", "rotary"] = "learned"
    rope_base: Positive = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    token_shift: bool | Literal["blocks"] = False
    convolution: Count = 1
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Positive = 1e-5
    activation: Activation = "gelu"
    bias: bool = False
    tied: bool = True
    dropout: Decay = 0.0
    init_std: Positive = 0.02
    lora: LoraConfig = LoraConfig()
    vocab_multiple: Count = 1
    vocab_padding: Steps = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_padding >= self.vocab_size:
            raise UsageError(
                f"vocab_padding={self.vocab_padding} leaves no token of vocab_size={self.vocab_size}",
                remedy="leave vocab_padding out: it is set when a run is opened",
            )
        if self.head_dim is None and self.d_model % self.n_heads:
            raise UsageError(
                f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}",
                remedy=f"give a d_model that is a multiple of {self.n_heads}, another n_heads, or a head_dim",
            )
        if self.attention_width == self.d_model:
            # A model has one configuration, because configurations are compared.
            msgspec.structs.force_setattr(self, "head_dim", None)
        if self.n_heads % self.n_kv_heads:
            raise UsageError(
                f"n_heads={self.n_heads} is not a multiple of kv_heads={self.kv_heads}",
                remedy=f"give a divisor of {self.n_heads}, or none for {self.n_heads}",
            )
        # The convolution runs over the fused projection, which grouped heads do not have.
        if self.grouped and self.convolution > 1:
            raise UsageError(
                f"convolution is {self.convolution}, and kv_heads is {self.kv_heads}: the convolution is over as many "
                "heads of keys and values as of queries",
                remedy="give convolution 1, or kv_heads none",
            )
        if self.positions == "learned" and self.rope_scaling.kind is not None:
            raise UsageError(
                f"rope_scaling.kind is {self.rope_scaling.kind!r}, and learned positions have no angles to scale",
                remedy='give rope_scaling.kind none, or positions="rotary"',
            )
        # Rotations act on pairs of elements.
        if self.positions == "rotary" and self.head_size % 2:
            raise UsageError(
                f"rotary positions need an even head size, and it is {self.head_size}",
                remedy='choose other sizes, or positions="learned"',
            )

    @property
    def n_tokens(self) -> int:
        # The last rows of the vocabulary have no token.
        return self.vocab_size - self.vocab_padding

    def with_tokens(self, count: int) -> Self:
        """Return a configuration with a vocabulary of at least ``count`` tokens; the other rows are padding."""
        size = math.ceil(max(self.vocab_size, count) / self.vocab_multiple) * self.vocab_multiple
        return msgspec.structs.replace(self, vocab_size=size, vocab_padding=size - count)

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """The width of all heads together, which the output projection takes."""
        return self.n_heads * self.head_size

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads if self.kv_heads is None else self.kv_heads

    @property
    def grouped(self) -> bool:
        return self.n_kv_heads < self.n_heads

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def mlp_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        # 8/3 d_model in three matrices has as many weights as 4 d_model in two.
        return math.ceil(self.d_model / 3) * 8 if self.gated else 4 * self.d_model

    def parameter_count(self, *, embeddings: bool = True) -> int:
        """Return the number of parameters; tied weights count once.

        ``embeddings=False`` excludes embeddings (Kaplan et al., arXiv 2001.08361), but not an untied head.
        """
        d, heads, key_width = self.d_model, self.attention_width, self.n_kv_heads * self.head_size
        # Two norms in a block and the final norm; only LayerNorm has a bias.
        norms = (2 * self.n_layers + 1) * d * (2 if self.bias and self.norm == "layernorm" else 1)
        norms += 2 * self.n_layers * self.head_size if self.qk_norm else 0
        # Outputs of a block's linear layers: attention out and MLP down (d each), q, k and v, MLP up and gate.
        widths = 2 * d + heads + 2 * key_width + self.mlp_width * (2 if self.gated else 1)
        biases = self.n_layers * widths if self.bias else 0
        head = 0 if self.tied else self.vocab_size * d
        positions = self.context_length * d if self.positions == "learned" else 0
        tables = self.vocab_size * d + positions if embeddings else 0
        # One token shift after the embedding, and two in a block.
        shifts = d * (1 + 2 * self.n_layers * (self.token_shift == "blocks")) if self.token_shift else 0
        taps = self.n_layers * 3 * heads * (self.convolution - 1)
        weights = self.n_layers * (self._block_matmul_weights() + self._adapter_weights())
        return weights + norms + biases + shifts + taps + head + tables

    def _adapter_weights(self) -> int:
        d, heads, width = self.d_model, self.attention_width, self.mlp_width
        keys_and_values = 2 * self.n_kv_heads * self.head_size
        # An adapter has rank x (inputs + outputs) weights.
        projected = (d + heads) + (d + keys_and_values) if self.grouped else d + 3 * heads
        attention = projected + (heads + d)
        found = attention if self.lora.adapts("attention") else 0
        found += (d + width) * (3 if self.gated else 2) if self.lora.adapts("mlp") else 0
        return self.lora.rank * found

    def _block_matmul_weights(self) -> int:
        # q and out have the width of all heads; k and v may have fewer heads.
        attention = 2 * self.d_model * (self.attention_width + self.n_kv_heads * self.head_size)
        return attention + (3 if self.gated else 2) * self.d_model * self.mlp_width

    def flops_per_token(self, context_length: int | None = None) -> int:
        """Return the floating-point operations of training on one token, forward and backward; only matmuls count.

        By convention attention counts in full, although half the scores are masked (Chowdhery et al., arXiv 2204.02311,
        appendix B). Recomputation by activation checkpointing does not count.
        """
        length = self.context_length if context_length is None else context_length
        if length < 1:
            raise UsageError(f"context_length is {length}", remedy="give 1 or more")
        # The head is a matmul; looking up embeddings is not.
        weights = self.n_layers * self._block_matmul_weights() + self.vocab_size * self.d_model
        # Forward 2 operations a weight, gradient of the input 2, gradient of the weight 2.
        trained = 6 * self.n_layers * self._adapter_weights()
        # 12 operations for each layer, channel and token of the context: two matmuls, forward and backward.
        # Frozen weights, beside adapters, have no gradient: 4 operations instead of 6.
        return (4 if self.lora.rank else 6) * weights + trained + 12 * self.n_layers * self.attention_width * length
