"""A conversation with a model: turns, their tokens, and the key-value cache that they share."""

from collections.abc import Collection, Generator

from msgspec.structs import replace

from chatgot.data.tokenizers.base import Tokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.generate import Sampling, generate_stream, until_stop
from chatgot.model.gpt import GPT
from tensorkeep.errors import UsageError

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
