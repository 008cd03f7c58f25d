"""The key-value cache of generation: keys and values of earlier tokens are computed once."""

import torch
from torch import Tensor

from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.shift import Tails


class LayerCache:
    """The keys and values of one attention layer, and the tails of its block.

    ``length`` positions are filled.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys
        self._values = values
        self.length = 0
        self.tails: Tails = {}

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, of shape [batch, heads, new positions, head size]; return those of all positions."""
        start, self.length = self.length, self.length + keys.shape[2]
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


class Cache:
    """The keys and values of all layers, in memory that is allocated once; see `GPT.new_cache`.

    It takes 2 n_layers elements for each position of each sequence and each channel of the heads of keys and values,
    d_model channels unless they are grouped, and does not support gradients.
    """

    def __init__(self, config: ModelConfig, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        shape = (2, config.n_layers, batch_size, config.n_kv_heads, config.context_length, config.head_size)
        keys, values = torch.empty(shape, device=device, dtype=dtype)
        self.layers = [LayerCache(*pair) for pair in zip(keys, values, strict=True)]
        self.tails: Tails = {}
        self.documents: Tensor | None = None
        """The number of the document of each token, [batch, positions], if the model masks documents."""

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        return self.layers[0].length

    def clear(self) -> None:
        """Remove all tokens."""
        self.tails.clear()
        self.documents = None
        for layer in self.layers:
            layer.length = 0
            layer.tails.clear()
