"""Generation: a prompt is continued token by token, each drawn from what the model says comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensorkeep.errors import UsageError
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.model.cache import Cache
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.model.modes import evaluating

Prompt = Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.integer] | Tensor
"""Token ids of one prompt, or of several of equal length."""

OnToken = Callable[[list[int]], None]
"""Called with each new token, one for each prompt."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits; see `generate` for the attributes.

    Raises
    ------
    UsageError
        If a value makes no sense.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(
                f"temperature is {self.temperature}", remedy="give 0, for the likeliest token, or a number above it"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}", remedy="give 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}", remedy="give a number above 0 and up to 1, or leave it out")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return one token for each row of logits.

        Parameters
        ----------
        logits : Tensor
            Of shape [batch, vocab_size], on the generator's device.
        generator : torch.Generator
            Not used at temperature 0.

        Returns
        -------
        Tensor
            int64, of shape [batch].
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each token, float64, of the shape of the logits; the temperature is above 0."""
        scaled = logits.double()
        # The largest is 0 before the division, so that no temperature makes it overflow.
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return scaled.softmax(dim=-1)
        # Stable: of equally likely tokens at the border, those with the lower ids stay.
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            scaled[:, self.top_k :] = -math.inf
        sorted_probabilities = scaled.softmax(dim=-1)
        if self.top_p is not None:
            sorted_probabilities = _nucleus(sorted_probabilities, self.top_p)
        return torch.zeros_like(sorted_probabilities).scatter(-1, order, sorted_probabilities)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep of each sorted row the likeliest tokens up to and with the one that reaches top_p."""
    if top_p == 1:
        return probabilities
    before = probabilities.cumsum(dim=-1).roll(1, -1)
    before[:, 0] = 0
    kept = probabilities.masked_fill(before >= top_p, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def prompt_ids(tokenizer: Tokenizer, prompt: str | None) -> list[int]:
    """Return the tokens of a prompt; without one that with which a document begins, or a line, or the first of all.

    Raises
    ------
    UsageError
        If the tokenizer does not know the prompt, or it is empty.
    """
    if prompt is not None:
        ids: list[int] = tokenizer.encode(prompt).tolist()
        if not ids:
            raise UsageError("the prompt is empty", remedy="give at least one token of text, or none at all")
        return ids
    if tokenizer.end_of_document is not None:
        return [tokenizer.end_of_document]
    try:
        return [int(tokenizer.encode("\n")[0])]
    except UsageError:
        return [0]


def generate(
    model: GPT,
    prompt_ids: Prompt,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | Collection[int] | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
    on_token: OnToken | None = None,
) -> Tensor:
    """Continue one prompt, or several of equal length.

    The model sees the last ``context_length`` tokens. As long as all fit, each is computed once and its keys and values
    are cached. Past that, the window moves by one with every token: all of it is then at other positions and has seen
    other tokens, so the cache is dropped and the whole window is computed for every token, for learned and rotary
    positions alike. Generation with and without the cache gives the same, up to rounding.

    The global random state is neither used nor changed, and the model is left in the mode that it was in.

    Parameters
    ----------
    model : GPT
    prompt_ids : sequence of int, sequence of such sequences, array or Tensor
        Token ids, of shape [positions] or [batch, positions].
    max_new_tokens : int
        How many tokens are added at most.
    temperature : float
        The logits are divided by it; 0 takes the likeliest token always.
    top_k : int, optional
        Draw from the so many likeliest tokens only.
    top_p : float, optional
        Draw from the likeliest tokens only, up to and with the one at which their probabilities, after ``top_k``, add
        up to it (nucleus sampling: Holtzman et al., arXiv 1904.09751).
    seed : int
        Of the draws, which are made on the CPU. With several prompts, each draw depends on how many there are.
    stop : int or collection of int, optional
        Tokens that end a sequence; they are part of it. One that ends before the others is filled up with its stop
        token.
    vocab_size : int, optional
        Choose among the first so many tokens only: the tokenizer's, where the model's vocabulary is padded.
    use_cache : bool
        False computes everything anew for every token.
    on_token : callable, optional
        Called with each new token as soon as it is drawn: a list of int, one for each prompt.

    Returns
    -------
    Tensor
        The prompt and what follows it, int64, with as many dimensions as the prompt, on the model's device.

    Raises
    ------
    UsageError
        If an argument makes no sense, or the model's logits are not finite.
    """
    sampling = Sampling(temperature, top_k, top_p)
    prompt = _checked_prompt(prompt_ids, model.config.vocab_size)
    stops = _checked_stops(stop, model.config.vocab_size)
    _check_numbers(max_new_tokens, seed, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    ids = _with_room(prompt, max_new_tokens, model.tokens.weight.device)
    batch, length = len(ids), prompt.shape[-1]
    # Inference mode would do, but for weights that are divided among processes.
    with torch.no_grad(), evaluating(model):
        cache = model.new_cache(batch) if use_cache else None
        ended = torch.zeros(batch, dtype=torch.bool)
        while length < ids.shape[1] and not ended.all():
            logits = _next_logits(model, ids[:, :length], cache)[:, :vocab_size]
            drawn = torch.where(ended, ids[:, length - 1].cpu(), sampling.choose(logits, generator))
            ids[:, length] = drawn
            length += 1
            ended = torch.isin(drawn, stops)
            if on_token is not None:
                on_token(drawn.tolist())
    ids = ids[:, :length].clone()
    return ids if prompt.ndim == 2 else ids[0]


def _with_room(prompt: Tensor, room: int, device: torch.device) -> Tensor:
    """Return prompts, one a row, with room for tokens behind them."""
    rows = prompt if prompt.ndim == 2 else prompt.unsqueeze(0)
    ids = torch.empty(len(rows), rows.shape[1] + room, dtype=torch.int64, device=device)
    ids[:, : rows.shape[1]] = rows
    return ids


def _check_numbers(max_new_tokens: int, seed: int, vocab_size: int | None) -> None:
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}", remedy="give 0 or more")
    if not 0 <= seed < 2**64:
        raise UsageError(f"the seed is {seed}", remedy="give a whole number from 0 to below 2**64")
    if vocab_size is not None and vocab_size < 1:
        raise UsageError(f"vocab_size is {vocab_size}", remedy="give 1 or more, or leave it out")


def _next_logits(model: GPT, ids: Tensor, cache: Cache | None) -> Tensor:
    """Return the logits of the token after these, on the CPU, of shape [batch, vocab_size]."""
    context_length = model.config.context_length
    if cache is None or ids.shape[1] > context_length:
        logits = model.last_logits(ids[:, -context_length:]).cpu()
    else:
        logits = model.last_logits(ids[:, cache.length :], cache).cpu()
    if not logits.isfinite().all():
        raise UsageError(
            f"the model's logits for token {ids.shape[1]} are not finite",
            remedy="its weights hold NaN or infinity, or numbers that overflow: take an earlier checkpoint",
        )
    return logits


def _checked_prompt(prompt_ids: Prompt, vocab_size: int) -> Tensor:
    """Return the prompt as an int64 tensor of shape [positions] or [batch, positions]."""
    try:
        prompt = prompt_ids if isinstance(prompt_ids, Tensor) else torch.tensor(prompt_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the prompt is no array of token ids ({error})", remedy="give lists of whole numbers, of equal length"
        ) from error
    if prompt.ndim not in (1, 2) or not prompt.numel():
        raise UsageError(
            f"the prompt has the shape {list(prompt.shape)}",
            remedy="give at least one token, as [positions] or [batch, positions]",
        )
    if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        raise UsageError(f"the prompt is of {prompt.dtype}", remedy="give token ids, which are whole numbers")
    prompt = prompt.to(torch.int64)
    _check_ids(prompt, vocab_size, "the prompt")
    return prompt


def _checked_stops(stop: int | Collection[int] | None, vocab_size: int) -> Tensor:
    wanted = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    stops = torch.tensor(wanted, dtype=torch.int64)
    _check_ids(stops, vocab_size, "stop")
    return stops


def _check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise UsageError(
            f"{what} has the token {outside[0].item()}, and the model knows 0 to {vocab_size - 1}",
            remedy="encode the text with the tokenizer that the model was trained with",
        )
