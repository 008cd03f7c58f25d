"""The model: token embedding, blocks, final norm and head."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from chatgot.model.attention import (
    SMALLEST_HEAD,
    Attention,
    Cache,
    LayerCache,
    Mask,
    dense_mask,
    document_numbers,
    tiled_mask,
)
from chatgot.model.config import ModelConfig
from chatgot.model.layers import (
    LearnedPositions,
    RotaryPositions,
    Rotation,
    TokenShift,
    build_linear,
    initial_adapter,
    is_adapter,
)
from tensorkeep.errors import UsageError

# The target of positions that do not count in the loss.
IGNORED = -1
# Matrices that write to the residual stream: their initial values are smaller in deep models.
_RESIDUAL = ("attention.out.weight", "mlp.down.weight")


# Not a lambda: a model can be pickled, as torch.save and processes do.
def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


# By the names of `Activation` in `chatgot.model.config`, which also says which of them gate.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": _relu2,
    "swiglu": functional.silu,
    "geglu": functional.gelu,
}


class MLP(nn.Module):
    """``down(activation(up(x)))``, or, for a gated activation, ``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = build_linear(config, "mlp", config.d_model, config.mlp_width)
        self.gate = build_linear(config, "mlp", config.d_model, config.mlp_width) if config.gated else None
        self.down = build_linear(config, "mlp", config.mlp_width, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        hidden = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        added: Tensor = self.dropout(self.down(hidden))
        return added


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class TransformerBlock(nn.Module):
    """A pre-norm block: only the inputs of attention and MLP are normalised (Radford et al., 2019, GPT-2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shifts = config.token_shift == "blocks"
        self.norm1 = build_norm(config)
        self.shift1 = TokenShift(config.d_model) if shifts else None
        self.attention = Attention(config)
        self.norm2 = build_norm(config)
        self.shift2 = TokenShift(config.d_model) if shifts else None
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, past: LayerCache | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Return the residual stream after this block, [batch, positions, d_model] like x; see `Attention`."""
        tails = None if past is None else past.tails
        normed = self.norm1(x)
        x = x + self.attention(normed if self.shift1 is None else self.shift1(normed, tails), rotation, past, mask)
        normed = self.norm2(x)
        after: Tensor = x + self.mlp(normed if self.shift2 is None else self.shift2(normed, tails))
        return after


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al., 2019, GPT-2), as configured by a `ModelConfig`.

    Checkpoints hold its tensors under these names; N counts the blocks from 0::

        tokens.weight                    [vocab_size, d_model]
        shift.share                      [d_model]                  token shift only
        positions.weight                 [context_length, d_model]  learned positions only
        blocks.N.norm1.weight            [d_model]
        blocks.N.shift1.share            [d_model]                  token shift in blocks only
        blocks.N.attention.qkv.weight    [3 width, d_model]         with ``kv_heads`` in its place:
        blocks.N.attention.q.weight      [width, d_model]           width = n_heads head_size, by default d_model
        blocks.N.attention.kv.weight     [2 kv_heads head_size, d_model]
        blocks.N.attention.convolution.taps.M  [3 width]            convolution only, M from 0
        blocks.N.attention.q_norm.weight [head_size]                ``qk_norm`` only, and so is ``k_norm``
        blocks.N.attention.out.weight    [d_model, width]
        blocks.N.norm2.weight            [d_model]
        blocks.N.shift2.share            [d_model]                  token shift in blocks only
        blocks.N.mlp.up.weight           [mlp_width, d_model]
        blocks.N.mlp.gate.weight         [mlp_width, d_model]       gated activations only
        blocks.N.mlp.down.weight         [d_model, mlp_width]
        blocks.N.LAYER.lora_a            [rank, inputs]             adapters only
        blocks.N.LAYER.lora_b            [outputs, rank]            adapters only
        norm.weight                      [d_model]
        head.weight                      [vocab_size, d_model]      the same tensor as tokens.weight if tied

    With ``bias``, each layer within the blocks and the final norm have a ``bias`` beside their ``weight``, except
    RMSNorm.

    A technique may replace ``blocks[i].forward`` (called as ``(x, rotation, past, mask)``) or
    ``blocks[i].attention.kernel``; neither changes the names.

    Parameters
    ----------
    config : ModelConfig
    generator : torch.Generator, optional
        Draws the initial weights on its own device: with a seeded CPU generator, the weights do not depend on the
        device of the model. By default torch's global generator.
    device : torch.device or str, optional
        The device of the parameters. On ``"meta"`` they have no values; call `initialise` after ``to_empty``.
    values : mapping of str to Tensor, optional
        Initial values of parameters by name, such as the weights of another model; the others are drawn.

    Attributes
    ----------
    config : ModelConfig
    document_end : int or None
        The token between documents, if no token attends to tokens of another document; None by default. See
        `chatgot.model.attention`.
    tokens, positions, blocks, norm, head : nn.Module
    shift : TokenShift or None

    Examples
    --------
    >>> config = ModelConfig(vocab_size=65, context_length=16, n_layers=2, n_heads=2, d_model=32)
    >>> model = GPT(config, generator=torch.Generator().manual_seed(0))
    >>> tokens = torch.arange(12).view(2, 6)
    >>> model(tokens).shape, model.loss(tokens[:, :-1], tokens[:, 1:]).ndim
    (torch.Size([2, 6, 65]), 0)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.document_end: int | None = None
        self.values = {} if values is None else values
        # Modules on meta draw no initial values, which `initialise` would overwrite.
        with torch.device("meta"):
            self.tokens = nn.Embedding(config.vocab_size, config.d_model)
            self.shift = TokenShift(config.d_model) if config.token_shift else None
            self.positions: LearnedPositions | RotaryPositions = (
                LearnedPositions(config) if config.positions == "learned" else RotaryPositions(config)
            )
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
            self.norm = build_norm(config)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._tie()
        if config.lora.rank:
            # Frozen weights get no gradient, and no optimizer state.
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        place = torch.get_default_device() if device is None else torch.device(device)
        if place.type != "meta":
            self.to_empty(device=place)
            self.initialise(generator)

    def _tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.tokens.weight

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Set the weights to the given values; the others are drawn as GPT-2's."""
        # `to_empty` has given tied weights separate memory.
        self._tie()
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, generator))
        self.fill_tables(self.tokens.weight.device)

    def initial_value(self, name: str, generator: torch.Generator | None = None) -> Tensor:
        """Return new values of a parameter, on the device of the generator; the model may be on any device.

        Called for each name of ``named_parameters()`` in order, it draws the weights that `initialise` would.
        """
        if name in self.values:
            # A copy: training must not change the tensors that were given.
            return self.values[name].clone()
        shape = self.get_parameter(name).shape
        if is_adapter(name):
            return initial_adapter(name, shape, generator)
        place = generator.device if generator is not None else "cpu"
        # Norms begin as identity; biases, token shifts and taps begin at 0. They draw no random numbers.
        if len(shape) == 1:
            return torch.full(shape, 1.0 if name.endswith("weight") else 0.0, device=place)
        # So that the variance of the residual stream does not grow with depth.
        scale = math.sqrt(2 * self.config.n_layers) if name.endswith(_RESIDUAL) else 1.0
        return torch.empty(shape, device=place).normal_(0.0, self.config.init_std / scale, generator=generator)

    def fill_tables(self, device: torch.device) -> None:
        # Tables are computed, not learned: `to_empty` has left them without values.
        if isinstance(self.positions, RotaryPositions):
            self.positions.fill(device)

    @property
    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the next token after each position, of shape [batch, positions, n_tokens].

        ``cache`` holds the keys and values of earlier tokens, and receives the new ones. UsageError if they are
        longer together than ``context_length``.
        """
        return self.logits(self.features(tokens, cache))

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of the head's input, without padding of the vocabulary."""
        # The head computes the padding rows too, for a faster matmul; the slice drops them.
        logits: Tensor = self.head(features)
        return logits[..., : self.config.n_tokens] if self.config.vocab_padding else logits

    def features(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the input of the head, [batch, positions, d_model], for losses that compute the head themselves."""
        # With a cache, these tokens begin at the position after the cached tokens.
        start = 0 if cache is None else cache.length
        stop = start + tokens.shape[-1]
        if tokens.ndim != 2:
            raise UsageError(
                f"the tokens have {tokens.ndim} dimensions", remedy="give a tensor of shape [batch, positions]"
            )
        if stop > self.config.context_length:
            raise UsageError(
                f"{stop} tokens do not fit into the context of {self.config.context_length}",
                remedy=f"give the last {self.config.context_length}, or train a model with a longer context",
            )
        x = self.embed(tokens, cache)
        # Looked up once, for all blocks.
        rotation = self.positions(start, stop) if isinstance(self.positions, RotaryPositions) else None
        mask = self.mask(tokens, cache)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, None if cache is None else cache.layers[index], mask)
        features: Tensor = self.norm(x)
        return features

    def mask(self, tokens: Tensor, cache: Cache | None = None) -> Mask | None:
        """Return the mask that keeps attention within documents; None unless ``document_end`` is set."""
        if self.document_end is None:
            return None
        # Generation continues the numbers of the cached tokens.
        documents = document_numbers(tokens, self.document_end, None if cache is None else cache.documents)
        if cache is not None:
            cache.documents = documents
            return dense_mask(documents, tokens.shape[1])
        # FlexAttention is compiled for each length, so it computes whole windows only. It has no dropout.
        config = self.config
        whole = tokens.shape[1] == config.context_length and not (self.training and config.dropout)
        tiled = tokens.is_cuda and whole and config.head_size >= SMALLEST_HEAD
        return tiled_mask(documents) if tiled else dense_mask(documents, tokens.shape[1])

    def embed(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        x: Tensor = self.tokens(tokens)
        if self.shift is not None:
            x = self.shift(x, None if cache is None else cache.tails)
        if isinstance(self.positions, LearnedPositions):
            x = x + self.positions(start, start + tokens.shape[-1])
        embedded: Tensor = self.dropout(x)
        return embedded

    def last_logits(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the token after the last one, of shape [batch, n_tokens]; see `forward`."""
        # The head computes one position only.
        return self.logits(self.features(tokens, cache)[:, -1])

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return token_loss(self(tokens), targets)

    def new_cache(self, batch_size: int) -> Cache:
        """Return an empty cache for ``context_length`` tokens, with the device and dtype of the weights."""
        weight = self.tokens.weight
        return Cache(self.config, batch_size, device=weight.device, dtype=weight.dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, computed in float32; NaN if no target counts.

    Logits have the shape [batch, positions, tokens], int64 targets [batch, positions]; a target of -1 does not count.
    """
    # In 16 bits, the sum over a vocabulary would lose digits of the loss.
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
