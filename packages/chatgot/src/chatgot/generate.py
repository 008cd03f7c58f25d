"""Text generation: token by token, with a key-value cache, and sampling by temperature, top-k, top-p, min-p.

A `ChatSession` generates the answers of a conversation.
"""

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from chatgot.data.tokenizers.base import Tokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.model.attention import Cache
from chatgot.model.gpt import GPT
from chatgot.settings import Count, NonNegative, Section
from chatgot.step.train_step import evaluating
from tensorkeep.errors import UsageError

# Token ids of one prompt, or of several prompts of equal length.
Prompt = Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.integer] | Tensor
# Called after each step with its new tokens, one for each prompt.
OnToken = Callable[[list[int]], None]


class Sampling(Section, frozen=True):
    """How a token is drawn from logits.

    >>> generator = torch.Generator().manual_seed(0)
    >>> Sampling(temperature=0).choose(torch.tensor([[0.1, 2.0, 0.3]]), generator)
    tensor([1])
    """

    # The logits are divided by it; 0 always takes the likeliest token.
    temperature: NonNegative = 1.0
    # Draw from this many of the likeliest tokens.
    top_k: Count | None = None
    # Draw from the fewest likeliest tokens with probabilities, after ``top_k``, that sum to at least this (nucleus
    # sampling; Holtzman et al., arXiv 1904.09751).
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    # Draw from the tokens that are at least this many times as likely as the likeliest, after ``top_p`` (Nguyen et al.,
    # arXiv 2407.01082).
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Logits of tokens that the sequence has already, except stop tokens, are divided by this if they are positive, else
    # multiplied (Keskar et al., arXiv 1909.05858); 1 changes nothing.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    # Draw from tokens below this only: the size of the tokenizer, if the vocabulary of the model is padded.
    vocab_size: Count | None = None

    def choose(self, logits: Tensor, generator: torch.Generator, earlier: Tensor | None = None) -> Tensor:
        """Return one token, int64, for each row of logits, given the ``earlier`` tokens, [batch, positions]."""
        logits = logits[:, : self.vocab_size]
        if self.repetition_penalty != 1 and earlier is not None:
            logits = _penalised(logits, earlier, self.repetition_penalty)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of every token, float64, of the shape of the logits; the temperature is above 0."""
        scaled = logits.double()
        # Subtract the maximum before the division, so that no temperature overflows.
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return _likely(scaled.softmax(dim=-1), self.min_p)
        # Stable: among equally likely tokens at the limit, lower ids are kept.
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            scaled[:, self.top_k :] = -math.inf
        sorted_probabilities = _likely(_nucleus(scaled.softmax(dim=-1), self.top_p), self.min_p)
        return torch.zeros_like(sorted_probabilities).scatter(-1, order, sorted_probabilities)


def _nucleus(probabilities: Tensor, top_p: float | None) -> Tensor:
    # Rounding may bring the sum to 1 before the last tokens.
    if top_p is None or top_p == 1:
        return probabilities
    # The sum before a token decides, so that the token that reaches top_p is kept, and at least one is.
    before = probabilities.cumsum(dim=-1).roll(1, -1)
    before[:, 0] = 0
    kept = probabilities.masked_fill(before >= top_p, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _likely(probabilities: Tensor, min_p: float | None) -> Tensor:
    if not min_p:
        return probabilities
    kept = probabilities.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _penalised(logits: Tensor, earlier: Tensor, penalty: float) -> Tensor:
    """Lower the logits of the tokens that each row has already; in float64, which no penalty overflows."""
    # Earlier tokens beyond these logits share a column, which is cut off again.
    padded, earlier = functional.pad(logits.double(), (0, 1)), earlier.clamp(max=logits.shape[-1])
    known = padded.gather(-1, earlier)
    return padded.scatter(-1, earlier, torch.where(known > 0, known / penalty, known * penalty))[:, :-1]


def generate(
    model: GPT,
    prompt_ids: Prompt,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | Collection[int] | None = None,
    use_cache: bool = True,
    on_token: OnToken | None = None,
    **options: Any,
) -> Tensor:
    """Continue one prompt, or several prompts of equal length; `generate_stream` yields the tokens one by one.

    The model attends to the last ``context_length`` tokens. The cache changes the result by rounding only. The global
    random state is neither used nor changed, and each module keeps its training mode.

    Parameters
    ----------
    model : GPT
    prompt_ids : sequence of int, sequence of such sequences, array or Tensor
        Token ids, of shape [positions] or [batch, positions].
    max_new_tokens : int
        The largest number of tokens to add.
    sampling : Sampling, optional
        How tokens are drawn; by default from all tokens, by their probability.
    seed : int
        The seed of the draws, which are made on the CPU. The draws of a prompt depend on the number of prompts.
    stop : int or collection of int, optional
        Tokens that end a sequence, and are included in it. A sequence that ends before the others is padded with its
        stop token.
    use_cache : bool
        False computes the whole window for every token.
    on_token : callable, optional
        Called with the new tokens as soon as they are drawn: a list of int, one for each prompt.
    **options
        The fields of `Sampling`, in place of ``sampling``.

    Returns
    -------
    Tensor
        The prompt and the new tokens, int64, with the dimensions of the prompt, on the model's device.

    Raises
    ------
    UsageError
        If an argument is out of range, or the model's logits are not finite.

    Examples
    --------
    >>> from chatgot.model.config import ModelConfig
    >>> model = GPT(ModelConfig(vocab_size=9, context_length=8, n_layers=1, n_heads=1, d_model=4))
    >>> generate(model, [1, 2, 3], max_new_tokens=4, temperature=0.8, seed=1).shape
    torch.Size([7])
    """
    drawn: list[list[int]] = []
    settings = {"sampling": sampling, "seed": seed, "stop": stop, "use_cache": use_cache, **options}
    for tokens in generate_stream(model, prompt_ids, max_new_tokens=max_new_tokens, **settings):
        drawn.append(tokens)
        if on_token is not None:
            on_token(tokens)
    prompt, _ = _checked_ids(prompt_ids, None, model.config.vocab_size)
    rows = prompt.reshape(-1, prompt.shape[-1]).cpu()
    # `view` gives the shape also if no token was drawn.
    new = torch.tensor(drawn, dtype=torch.int64).view(len(drawn), len(rows)).T
    return torch.cat([rows, new], dim=1).view(*prompt.shape[:-1], -1).to(model.tokens.weight.device)


def generate_stream(
    model: GPT,
    prompt_ids: Prompt,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | Collection[int] | None = None,
    use_cache: bool = True,
    cache: Cache | None = None,
    **options: Any,
) -> Iterator[list[int]]:
    """Continue one prompt, or several prompts of equal length, token by token.

    The arguments are checked at once. Gradients and the training mode of the model are as before between two tokens,
    and the model must not be changed.

    Parameters
    ----------
    model, prompt_ids, max_new_tokens, sampling, seed, stop, use_cache, **options
        See `generate`.
    cache : Cache, optional
        A cache that may hold the beginning of the prompt; the new keys and values are added.

    Returns
    -------
    iterator of list of int
        The new tokens as soon as they are drawn, one for each prompt.

    Raises
    ------
    UsageError
        If an argument is out of range, or the model's logits are not finite.

    Examples
    --------
    >>> from chatgot.model.config import ModelConfig
    >>> model = GPT(ModelConfig(vocab_size=9, context_length=8, n_layers=1, n_heads=1, d_model=4))
    >>> tokens = [token for (token,) in generate_stream(model, [1, 2, 3], max_new_tokens=4, seed=1)]
    >>> tokens == generate(model, [1, 2, 3], max_new_tokens=4, seed=1)[3:].tolist()
    True
    """
    if sampling is None:
        sampling = Sampling(**options)
    elif options:
        raise UsageError(f"sampling and {', '.join(options)} are given", remedy="set them in sampling only")
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}", remedy="give 0 or more")
    if not 0 <= seed < 2**64:
        raise UsageError(f"the seed is {seed}", remedy="give a whole number from 0 to below 2**64")
    prompt, stops = _checked_ids(prompt_ids, stop, model.config.vocab_size)
    length = prompt.shape[-1]
    # Allocated at its final length: new tokens are written in place.
    ids = functional.pad(prompt.reshape(-1, length), (0, max_new_tokens)).to(model.tokens.weight.device)
    if cache is None and use_cache:
        cache = model.new_cache(len(ids))
    # On the CPU, so that every device draws the same tokens from the same logits.
    generator = torch.Generator().manual_seed(seed)

    def draw(position: int, ended: Tensor) -> Tensor:
        # Not inference_mode, which does not support sharded weights. Not open while the caller uses the token.
        with torch.no_grad(), evaluating(model):
            logits = _next_logits(model, ids[:, :position], cache)
        earlier = ids[:, :position].cpu()
        # Stop tokens become tokens beyond the logits, which are not penalised: each earlier message ended with one.
        earlier = earlier.masked_fill(torch.isin(earlier, stops), logits.shape[-1])
        drawn = sampling.choose(logits, generator, earlier)
        # A sequence that has ended repeats its stop token, until all have ended.
        return torch.where(ended, ids[:, position - 1].cpu(), drawn)

    # A generator of its own: the arguments are checked when it is made.
    def stream() -> Iterator[list[int]]:
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for position in range(length, ids.shape[1]):
            ids[:, position] = drawn = draw(position, ended)
            ended = torch.isin(drawn, stops)
            yield drawn.tolist()
            if ended.all():
                return

    return stream()


def _next_logits(model: GPT, ids: Tensor, cache: Cache | None) -> Tensor:
    """Return the logits of the token after these, on the CPU, of shape [batch, vocab_size]."""
    # While all tokens fit into the context, each is computed once and its keys and values are cached. After that, the
    # window moves by one position with every token, which changes all positions: the whole window is computed again.
    if cache is None or ids.shape[1] > model.config.context_length:
        logits = model.last_logits(ids[:, -model.config.context_length :]).cpu()
    else:
        logits = model.last_logits(ids[:, cache.length :], cache).cpu()
    if not logits.isfinite().all():
        raise UsageError(
            f"the model's logits for token {ids.shape[1]} are not finite",
            remedy="its weights are not finite or overflow: use an earlier checkpoint",
        )
    return logits


def _checked_ids(prompt_ids: Prompt, stop: int | Collection[int] | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the prompt, of shape [positions] or [batch, positions], and the tokens that end a sequence; both int64."""
    try:
        prompt = prompt_ids if isinstance(prompt_ids, Tensor) else torch.tensor(prompt_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the prompt is not an array of token ids ({error})", remedy="give lists of whole numbers, of equal length"
        ) from error
    if prompt.ndim not in (1, 2) or not prompt.numel():
        raise UsageError(
            f"the prompt has the shape {list(prompt.shape)}",
            remedy="give at least one token, as [positions] or [batch, positions]",
        )
    if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        raise UsageError(f"the prompt is of {prompt.dtype}", remedy="give token ids, which are whole numbers")
    ends = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    prompt, stops = prompt.to(torch.int64), torch.tensor(ends, dtype=torch.int64)
    for what, ids in (("the prompt", prompt), ("stop", stops)):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.numel():
            raise UsageError(
                f"{what} has the token {outside[0].item()}, and the model has tokens 0 to {vocab_size - 1}",
                remedy="encode the text with the tokenizer that the model was trained with",
            )
    return prompt, stops


def until_stop(pieces: Iterable[str], stops: Collection[str]) -> Iterator[str]:
    """Yield the pieces of a text up to the first stop text, which is left out.

    The end of a piece that may begin a stop text is held back until the next piece decides it.

    >>> list(until_stop(["one tw", "o th", "ree"], ["two"]))
    ['one ']
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [at for each in stops if (at := held.find(each)) >= 0]
        if found:
            if held[: min(found)]:
                yield held[: min(found)]
            return
        # Less than a stop text: a whole one would have been found above.
        kept = max((n for each in stops for n in range(1, len(each)) if held.endswith(each[:n])), default=0)
        if ready := held[: len(held) - kept]:
            yield ready
        held = held[len(held) - kept :]
    if held:
        yield held


# Conversations: turns, their tokens, and the key-value cache that they share.

# 1 / this fraction of the context is kept free for an answer, unless ``max_new_tokens`` is less.
_RESERVED_FRACTION = 4


class ChatSession:
    """Messages of a user and answers of a model, generated token by token.

    The keys and values of all messages stay in the cache, so that a turn computes only its own tokens. When the
    messages no longer fit into the context, the oldest turns are left out; the system message stays.

    ``seed`` is for the first answer, and each later answer takes the next one. An answer ends at a text of ``stop``,
    which is left out. Raises UsageError if the model was not trained on conversations.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        system: str | None = None,
        max_new_tokens: int = 200,
        stop: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        if not isinstance(tokenizer, ChatTokenizer):
            raise UsageError(
                f"the model was not trained on conversations: its tokenizer ({tokenizer.name}) has no message tokens",
                remedy="train it on conversations (docs/how-to/chat.md), or use tensorkeep generate",
            )
        self._model, self._tokenizer = model, tokenizer
        # Not from tokens that only pad the vocabulary.
        self._sampling = replace(sampling, vocab_size=tokenizer.vocab_size)
        self._system, self._max_new_tokens, self._stop, self._seed = system, max_new_tokens, stop, seed
        self._cache = model.new_cache(1)
        # Of all answers.
        self.tokens = 0
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = []
        self._first = self._tokenizer.opening
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
            self._first = [*self._first, *self._tokenizer.message("system", self._system).tolist()]
        self._turns: list[list[int]] = []
        # Turns that are no longer in the context.
        self.left_out = 0
        self._cache.clear()

    def answer(self, text: str) -> Generator[str]:
        """Add a message of the user, and yield the answer as it is generated. An answer that ends early is kept.

        Raises UsageError, before the session changes, if the message does not fit, or the tokenizer cannot encode it.
        """
        # The turn ends with the token that begins an answer, so the model continues with the answer.
        begin = self._tokenizer.begin["assistant"]
        turn = [*self._tokenizer.message("user", text).tolist(), begin]
        # Here and not in the generator, which runs at the first piece only: errors must come at once.
        self._make_space(turn)
        return self._generated(turn, text)

    def _generated(self, turn: list[int], text: str) -> Generator[str]:
        message = {"role": "assistant", "content": ""}
        # Part of the session from the start, so that an interrupted answer keeps its pieces.
        self._turns.append(turn)
        self.messages += [{"role": "user", "content": text}, message]
        prompt = [*self._first, *(token for each in self._turns for token in each)]
        tokenizer = self._tokenizer
        drawn = generate_stream(
            self._model,
            prompt,
            max_new_tokens=min(self._max_new_tokens, self._model.config.context_length - len(prompt)),
            sampling=self._sampling,
            seed=self._seed,
            stop=tokenizer.stops,
            cache=self._cache,
        )
        self._seed += 1
        # The tokens of the answer follow the tokens of the message in `turn`.
        begin, ended = len(turn), False

        def content() -> Generator[int]:
            nonlocal ended
            for (token,) in drawn:
                if token in tokenizer.stops:
                    break
                turn.append(token)
                self.tokens += 1
                yield token
            ended = True

        try:
            for piece in until_stop(tokenizer.decode_stream(content()), self._stop):
                message["content"] += piece
                yield piece
            if not ended:
                # A stop text ended the answer. The next turn must not see its tokens, so the cache is dropped as well.
                # Encoded again: the tokens of the kept text may differ from a prefix of the drawn tokens.
                turn[begin:] = tokenizer.message("assistant", message["content"]).tolist()[1:-1]
                self._cache.clear()
        except GeneratorExit:
            # The caller stopped between two tokens: the cache is consistent.
            raise
        except BaseException:
            # The exception may have interrupted a forward pass that was filling the cache.
            self._cache.clear()
            raise
        finally:
            # However the answer ended, the next turn follows a complete message.
            turn.append(tokenizer.end)

    def _make_space(self, turn: list[int]) -> None:
        """Drop the oldest turns until a new turn and its answer fit."""
        length = self._model.config.context_length
        limit = length - min(self._max_new_tokens, max(1, length // _RESERVED_FRACTION))
        used = len(self._first) + len(turn)
        if used > limit:
            raise UsageError(
                f"the message needs {used:,} tokens, with the system message, and {limit:,} of the context of "
                f"{length:,} are for messages",
                remedy="give a shorter one, or train a model with a longer context",
            )
        # The cache holds the tokens of dropped turns at its beginning, so it starts again without them.
        sizes = [len(each) for each in self._turns]
        out = 0
        while used + sum(sizes[out:]) > limit:
            out += 1
        if out:
            del self._turns[:out]
            self.left_out += out
            self._cache.clear()
