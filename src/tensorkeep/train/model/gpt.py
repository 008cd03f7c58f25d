"""The model: token embedding, blocks, final norm and head."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.errors import UsageError
from tensorkeep.train.model.attention import Attention
from tensorkeep.train.model.block import Block, build_norm
from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.document_mask import SMALLEST_HEAD, Mask, dense_mask, document_numbers, tiled_mask
from tensorkeep.train.model.lora import initial_adapter, is_adapter
from tensorkeep.train.model.positions import LearnedPositions, RotaryPositions
from tensorkeep.train.model.shift import TokenShift

IGNORED = -1
"""The target of positions that do not count in the loss."""

_RESIDUAL = ("attention.out.weight", "mlp.down.weight")


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
        Draws the initial weights on its own device: with a seeded CPU generator, they do not depend on the device of
        the model. By default torch's global generator.
    device : torch.device or str, optional
        Of the parameters. On ``"meta"`` they have no values; call `initialise` after ``to_empty``.
    values : mapping of str to Tensor, optional
        Initial values of parameters by name, such as those of another model; the others are drawn.

    Attributes
    ----------
    config : ModelConfig
    document_end : int or None
        The token between documents, if no token attends to those of another document; None by default. See
        `tensorkeep.train.model.document_mask`.
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
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
            self.norm = build_norm(config)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._tie()
        if config.lora.rank:
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
        """Set the weights to their initial values, which are drawn as GPT-2 does unless they were given.

        Matrices are normal with ``init_std``; those that write to the residual stream have ``init_std`` divided by
        sqrt(2 n_layers), so that its variance does not grow with depth. Biases, token shifts and the taps of
        convolutions are 0, the weights of norms 1.
        """
        self._tie()
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, generator))
        self.fill_tables(self.tokens.weight.device)

    def initial_value(self, name: str, generator: torch.Generator | None = None) -> Tensor:
        """Return new values of a parameter, on the device of the generator; the model may be on any device.

        Called for each name of ``named_parameters()`` in order, it draws the weights that `initialise` would.
        """
        if name in self.values:
            return self.values[name].clone()
        shape = self.get_parameter(name).shape
        if is_adapter(name):
            return initial_adapter(name, shape, generator)
        place = generator.device if generator is not None else "cpu"
        if len(shape) == 1:
            return torch.full(shape, 1.0 if name.endswith("weight") else 0.0, device=place)
        scale = math.sqrt(2 * self.config.n_layers) if name.endswith(_RESIDUAL) else 1.0
        return torch.empty(shape, device=place).normal_(0.0, self.config.init_std / scale, generator=generator)

    def fill_tables(self, device: torch.device) -> None:
        """Compute, on a device, what is not learned: the tables of rotary positions."""
        if isinstance(self.positions, RotaryPositions):
            self.positions.fill(device)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each block."""
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits of the next token after each position.

        Parameters
        ----------
        tokens : Tensor
            int64, of shape [batch, positions].
        cache : Cache, optional
            The keys and values of the tokens before these; those of these tokens are added.

        Returns
        -------
        Tensor
            Of shape [batch, positions, n_tokens].

        Raises
        ------
        UsageError
            If the tokens, with those in the cache, are more than ``context_length``.
        """
        return self.logits(self.features(tokens, cache))

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits that the head computes from its input, without those of padding."""
        logits: Tensor = self.head(features)
        return logits[..., : self.config.n_tokens] if self.config.vocab_padding else logits

    def features(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the input of the head, [batch, positions, d_model], for losses that compute the head themselves."""
        start = 0 if cache is None else cache.length
        stop = start + tokens.shape[-1]
        self._check(tokens, stop)
        x = self.embed(tokens, cache)
        rotation = self.positions(start, stop) if isinstance(self.positions, RotaryPositions) else None
        mask = self.mask(tokens, cache)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, None if cache is None else cache.layers[index], mask)
        features: Tensor = self.norm(x)
        return features

    def mask(self, tokens: Tensor, cache: Cache | None = None) -> Mask | None:
        """Return what keeps attention within documents, if ``document_end`` is set; None otherwise.

        On CUDA, FlexAttention computes whole windows of training, if they have no dropout; everything else, of many
        lengths for each of which it would be compiled, has a dense mask.
        """
        if self.document_end is None:
            return None
        documents = document_numbers(tokens, self.document_end, None if cache is None else cache.documents)
        if cache is not None:
            cache.documents = documents
        elif self._takes_tiles(tokens):
            return tiled_mask(documents)
        return dense_mask(documents, tokens.shape[1])

    def _takes_tiles(self, tokens: Tensor) -> bool:
        config = self.config
        whole = tokens.shape[1] == config.context_length and not (self.training and config.dropout)
        return tokens.is_cuda and whole and config.head_size >= SMALLEST_HEAD

    def embed(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the input of the first block, of shape [batch, positions, d_model]; see `forward`."""
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
        return self.logits(self.features(tokens, cache)[:, -1])

    def _check(self, tokens: Tensor, stop: int) -> None:
        if tokens.ndim != 2:
            raise UsageError(
                f"the tokens have {tokens.ndim} dimensions", remedy="give a tensor of shape [batch, positions]"
            )
        if stop > self.config.context_length:
            raise UsageError(
                f"{stop} tokens do not fit into the context of {self.config.context_length}",
                remedy=f"give the last {self.config.context_length}, or train a model with a longer context",
            )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of the targets, in nats; see `token_loss`."""
        return token_loss(self(tokens), targets)

    def new_cache(self, batch_size: int) -> Cache:
        """Return an empty cache for sequences of up to ``context_length`` tokens, of the weights' device and dtype."""
        weight = self.tokens.weight
        return Cache(self.config, batch_size, device=weight.device, dtype=weight.dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, computed in float32; NaN if no target counts.

    Logits are of shape [batch, positions, tokens], int64 targets of shape [batch, positions]; -1 does not count.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
