"""The configuration of a model: its sizes and parts, checked, and what follows from them in parameters and FLOPs."""

from __future__ import annotations

import math
from typing import Literal, TypeGuard

import msgspec

from tensorkeep.errors import UsageError

Positions = Literal["learned", "rotary"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu"]

GATED = ("swiglu", "geglu")
"""Activations that multiply two projections of the input (Shazeer, arXiv 2002.05202)."""

_CHOICES = {
    "positions": ("learned", "rotary"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu"),
}
_SIZES = ("vocab_size", "context_length", "n_layers", "n_heads", "d_model")
_FLAGS = ("token_shift", "bias", "tied")
_NUMBERS = ("rope_base", "norm_eps", "init_std")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `GPT` consists of.

    Attributes
    ----------
    vocab_size : int
        Number of tokens.
    context_length : int
        The most tokens that the model sees at once.
    n_layers, n_heads, d_model : int
        Blocks, attention heads in each, and the width of the residual stream, a multiple of the heads.
    d_ff : int, optional
        Width of the hidden layer of the MLPs. By default 4 d_model, or where the activation is gated 8/3 d_model,
        rounded up to a multiple of 8, so that both have about as many parameters; see `mlp_width`.
    positions : str
        ``"learned"``: an embedding of each position is added to the tokens' (GPT-2); ``"rotary"``: queries and keys
        are rotated by an angle proportional to their position (Su et al., arXiv 2104.09864), which needs an even head
        size.
    rope_base : float
        Of rotary positions: the wavelengths reach from 2 pi almost to 2 pi times it, in tokens.
    token_shift : bool
        Whether a learned share of the embedding of the token before is added to each; see `TokenShift`.
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
        Probability that an element is zeroed in training: of the embeddings, of the attention weights, and of what
        each block adds to the residual stream.
    init_std : float
        Standard deviation of the initial weights.

    Raises
    ------
    UsageError
        If the values make no model, naming the field.
    """

    vocab_size: int
    context_length: int
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int | None = None
    positions: Positions = "learned"
    rope_base: float = 10000.0
    token_shift: bool = False
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    activation: Activation = "gelu"
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in _SIZES:
            _check_size(field, getattr(self, field))
        if self.d_ff is not None:
            _check_size("d_ff", self.d_ff)
        for field, choices in _CHOICES.items():
            _check_choice(field, getattr(self, field), choices)
        for field in _FLAGS:
            _check_flag(field, getattr(self, field))
        for field in _NUMBERS:
            _check_number(field, getattr(self, field))
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise UsageError(f"dropout is {self.dropout!r}", remedy="give a number from 0 to below 1")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.d_model % self.n_heads:
            raise UsageError(
                f"d_model={self.d_model} does not divide into n_heads={self.n_heads}",
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

        Parameters
        ----------
        embeddings : bool
            False leaves out the tables of tokens and positions, as scaling laws do (Kaplan et al., arXiv 2001.08361).
            An untied head stays in; a tied one is the table of tokens.
        """
        d = self.d_model
        norms = (2 * self.n_layers + 1) * d * (2 if self.bias and self.norm == "layernorm" else 1)
        biases = self.n_layers * (3 * d + d + self.mlp_width * (2 if self.gated else 1) + d) if self.bias else 0
        head = 0 if self.tied else self.vocab_size * d
        positions = self.context_length * d if self.positions == "learned" else 0
        tables = self.vocab_size * d + positions if embeddings else 0
        shift = d if self.token_shift else 0
        return self.n_layers * self._block_products() + norms + biases + shift + head + tables

    def _block_products(self) -> int:
        """Return the weights of one block that enter matrix products."""
        attention = 4 * self.d_model**2
        return attention + (3 if self.gated else 2) * self.d_model * self.mlp_width

    def flops_per_token(self, context_length: int | None = None) -> int:
        """Return the floating-point operations of training on one token, forward and backward.

        Only matrix products count: 6 for each weight that enters one, the head's included and embedding look-ups not,
        and 12 n_layers d_model T for attention over T tokens. Attention is counted in full, as the convention is,
        although half of it is masked (Chowdhery et al., arXiv 2204.02311, appendix B). What activation checkpointing
        computes twice counts once.

        Parameters
        ----------
        context_length : int, optional
            T, the length of the sequences; the model's, by default.
        """
        if context_length is not None:
            _check_size("context_length", context_length)
        length = self.context_length if context_length is None else context_length
        weights = self.n_layers * self._block_products() + self.vocab_size * self.d_model
        return 6 * weights + 12 * self.n_layers * self.d_model * length


def _check_size(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{field} is {value!r}", remedy="give a whole number, 1 or more")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{field} is {value!r}", remedy=f"choose one of {', '.join(choices)}")


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{field} is {value!r}", remedy="give true or false")


def _check_number(field: str, value: object) -> None:
    if not (_is_number(value) and value > 0):
        raise UsageError(f"{field} is {value!r}", remedy="give a number above 0")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
