"""The configuration of a model, and what follows from it: parameters and FLOPs."""

import math
from typing import Literal

from tensorkeep.errors import UsageError
from tensorkeep.train.config.sections import Count, Decay, Positive, Section

Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu"]

GATED = ("swiglu", "geglu")
"""Activations that multiply two projections of the input (Shazeer, arXiv 2002.05202)."""


class ModelConfig(Section, frozen=True):
    """What a `GPT` consists of.

    Attributes
    ----------
    vocab_size : int
        Number of tokens.
    context_length : int
        The largest number of tokens that the model attends to.
    n_layers, n_heads, d_model : int
        Blocks, attention heads in each, and the width of the residual stream, a multiple of the heads.
    d_ff : int, optional
        Width of the hidden layer of the MLPs. The default is 4 d_model; for gated activations it is 8/3 d_model,
        rounded up to a multiple of 8, so that both have about the same number of parameters; see `mlp_width`.
    positions : str
        ``"learned"``: an embedding of each position is added to the tokens' (GPT-2); ``"rotary"``: queries and keys
        are rotated by an angle proportional to their position (Su et al., arXiv 2104.09864), which needs an even head
        size.
    rope_base : float
        Of rotary positions: the wavelengths range from 2 pi to almost 2 pi times the base, in tokens.
    token_shift : bool or str
        Whether a learned fraction of the previous token's embedding is added to each embedding; with ``"blocks"``, the
        same is done with the input of every attention and MLP as well; see `TokenShift`.
    convolution : int
        The width in positions of a causal convolution over queries, keys and values, each channel by itself; 1
        for none; see `CausalConvolution`.
    norm : str
        ``"layernorm"`` or ``"rmsnorm"`` (Zhang and Sennrich, arXiv 1910.07467).
    norm_eps : float
        Added to the variance, or to the mean square.
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
    init_std : float
        Standard deviation of the initial weights.

    Raises
    ------
    UsageError
        If a value is out of bounds, or ``d_model`` is not a multiple of ``n_heads``.

    Examples
    --------
    >>> config = ModelConfig(vocab_size=65, context_length=64, n_layers=4, n_heads=4, d_model=128)
    >>> config.head_size, config.mlp_width, config.parameter_count()
    (32, 512, 804096)
    """

    vocab_size: Count
    context_length: Count
    n_layers: Count
    n_heads: Count
    d_model: Count
    d_ff: Count | None = None
    positions: Literal["learned", "rotary"] = "learned"
    rope_base: Positive = 10000.0
    token_shift: bool | Literal["blocks"] = False
    convolution: Count = 1
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Positive = 1e-5
    activation: Activation = "gelu"
    bias: bool = False
    tied: bool = True
    dropout: Decay = 0.0
    init_std: Positive = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % self.n_heads:
            raise UsageError(
                f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}",
                remedy=f"give a d_model that is a multiple of {self.n_heads}, or another n_heads",
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise UsageError(
                f"rotary positions need an even head size, and d_model / n_heads is {self.head_size}",
                remedy='choose other sizes, or positions="learned"',
            )

    @property
    def head_size(self) -> int:
        """The width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def gated(self) -> bool:
        """Whether the MLPs have a gate."""
        return self.activation in GATED

    @property
    def mlp_width(self) -> int:
        """The width of the hidden layer of the MLPs: ``d_ff``, or its default."""
        if self.d_ff is not None:
            return self.d_ff
        return math.ceil(self.d_model / 3) * 8 if self.gated else 4 * self.d_model

    def parameter_count(self, *, embeddings: bool = True) -> int:
        """Return the number of parameters; tied weights count once.

        ``embeddings=False`` excludes the token and position embeddings, as scaling laws do (Kaplan et al., arXiv
        2001.08361). An untied head is always included; a tied head is the token embedding.
        """
        d = self.d_model
        norms = (2 * self.n_layers + 1) * d * (2 if self.bias and self.norm == "layernorm" else 1)
        biases = self.n_layers * (3 * d + d + self.mlp_width * (2 if self.gated else 1) + d) if self.bias else 0
        head = 0 if self.tied else self.vocab_size * d
        positions = self.context_length * d if self.positions == "learned" else 0
        tables = self.vocab_size * d + positions if embeddings else 0
        shifts = d * (1 + 2 * self.n_layers * (self.token_shift == "blocks")) if self.token_shift else 0
        taps = self.n_layers * 3 * d * (self.convolution - 1)
        return self.n_layers * self._block_matmul_weights() + norms + biases + shifts + taps + head + tables

    def _block_matmul_weights(self) -> int:
        """Return the number of weights of one block that take part in matmuls."""
        attention = 4 * self.d_model**2
        return attention + (3 if self.gated else 2) * self.d_model * self.mlp_width

    def flops_per_token(self, context_length: int | None = None) -> int:
        """Return the floating-point operations of training on one token, forward and backward.

        Only matmuls count: 6 operations for each weight of a matmul (the head included, embedding look-ups not), and
        12 n_layers d_model T for attention over T tokens, by default the context of the model. By convention attention
        counts in full, although half of it is masked (Chowdhery et al., arXiv 2204.02311, appendix B). Recomputation by
        activation checkpointing does not count.
        """
        length = self.context_length if context_length is None else context_length
        if length < 1:
            raise UsageError(f"context_length is {length}", remedy="give 1 or more")
        weights = self.n_layers * self._block_matmul_weights() + self.vocab_size * self.d_model
        return 6 * weights + 12 * self.n_layers * self.d_model * length
