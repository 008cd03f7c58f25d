"""The loss of a model on a text, and the windows of the text that it is computed on."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tensorkeep.train.data.batches import Batch
from tensorkeep.train.data.tokenizers.base import Tokens
from tensorkeep.train.model.gpt import GPT, IGNORED
from tensorkeep.train.run.world import World


class EvaluationWindows:
    """Consecutive windows of a text, without overlap: in all of them together, each token is a target once.

    The last window may be shorter. The first token, which nothing precedes, is not a target.

    Parameters
    ----------
    tokens : array of uint16 or uint32
        The text, 1-D, of at least two tokens.
    context_length : int
        Tokens in a window.
    most : int, optional
        Use only as many windows as have this many tokens, spread evenly over the text.

    Examples
    --------
    >>> windows = EvaluationWindows(np.arange(8, dtype=np.uint16), 3)
    >>> windows.targets
    7
    >>> [targets.tolist() for _, targets in windows.batches(2)]
    [[[1, 2, 3], [4, 5, 6]], [[7, -1, -1], [-1, -1, -1]]]
    """

    note: str | None = None
    """What of the text is not used, for the user, if anything is left out."""

    def __init__(self, tokens: Tokens, context_length: int, *, most: int | None = None) -> None:
        self._tokens = tokens
        self._length = context_length
        self._all = -(-(len(tokens) - 1) // context_length)
        self._chosen = self._all if most is None else min(self._all, -(-most // context_length))

    @property
    def targets(self) -> int:
        """The number of tokens that are predicted."""
        last_missing = self._all * self._length - (len(self._tokens) - 1)
        has_last = self._begin(self._chosen - 1) == (self._all - 1) * self._length
        return self._chosen * self._length - (last_missing if has_last else 0)

    def batches(self, rows: int, *, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Yield the windows in batches of one shape, of up to ``rows`` windows.

        Rows are filled up with targets that do not count. Each of several processes takes one of ``parts`` equal parts;
        all of them get the same number of batches of the same shape.
        """
        own = -(-self._chosen // parts)
        count = -(-own // rows)
        rows = -(-own // count)
        numbers = range(part, self._chosen, parts)
        for first in range(0, count * rows, rows):
            inputs = torch.zeros(rows, self._length, dtype=torch.int64)
            targets = torch.full_like(inputs, IGNORED)
            for row, number in enumerate(numbers[first : first + rows]):
                known, following = self.pair(number)
                inputs[row, : len(known)], targets[row, : len(known)] = known, following
            yield inputs, targets

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of a window; the last one may be shorter."""
        window = self.window(number)
        return window[:-1], window[1:]

    def window(self, number: int) -> Tensor:
        """Return the tokens of a window and the one after it, int64."""
        begin = self._begin(number)
        return torch.from_numpy(self._tokens[begin : begin + self._length + 1].astype(np.int64))

    def __len__(self) -> int:
        return self._chosen

    def _begin(self, number: int) -> int:
        return number * self._all // self._chosen * self._length


def evaluate(
    model: GPT,
    batches: Iterable[Batch],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    world: World | None = None,
) -> float:
    """Return the mean loss over all targets of some batches that count, in nats.

    No random numbers are drawn, and each module keeps its training mode. The host waits for the device once, at the
    end.

    Parameters
    ----------
    model : GPT
    batches : iterable of (Tensor, Tensor)
        Inputs and targets, int64, of shape [batch, positions]; targets of -1 do not count.
    loss : callable, optional
        Returns the mean loss of a batch; by default ``model.loss``.
    world : World, optional
        The ranks whose batches count together. A collective: each rank has as many batches as the others.

    Examples
    --------
    >>> from tensorkeep.train.model.config import ModelConfig
    >>> config = ModelConfig(vocab_size=8, context_length=4, n_layers=1, n_heads=1, d_model=4)
    >>> tokens = torch.arange(5).unsqueeze(0)
    >>> model = GPT(config, generator=torch.Generator().manual_seed(0))
    >>> f"{evaluate(model, [(tokens[:, :-1], tokens[:, 1:])]):.1f}"  # ln 8, before training
    '2.1'
    """
    device = model.tokens.weight.device
    total, counted = torch.zeros((), dtype=torch.float64, device=device), 0
    # Not inference_mode, which does not support sharded weights.
    with torch.no_grad(), evaluating(model):
        for inputs, targets in batches:
            count = int((targets != IGNORED).sum())
            mean = (loss or model.loss)(_moved(inputs, device), _moved(targets, device))
            # A batch without a target is computed all the same: other ranks wait for this one. Its mean is NaN.
            total += mean.double() * count if count else 0.0
            counted += count
    sums = torch.stack([total, torch.full_like(total, counted)])
    nats, tokens = (sums if world is None else world.mean(sums)).tolist()
    return float(nats / tokens)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to a device; a GPU copies pinned memory while the host continues."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode (no dropout); afterwards each module has its previous mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
