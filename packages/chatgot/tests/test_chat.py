"""A conversation with a model: its tokens, the cache that turns share, and answers that end early."""

from typing import Any

import pytest
import torch

import tensorkeep
from chatgot.data.tokenizers.char import ByteTokenizer, CharTokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.generate import ChatSession, Sampling, generate
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT

# All ASCII characters that can be printed, so that text and tokens are the same.
CHAT = ChatTokenizer(CharTokenizer("".join(map(chr, range(32, 127))), documents=True))


def build(**parts: Any) -> GPT:
    sizes = {"vocab_size": 270, "context_length": 96, "n_layers": 2, "n_heads": 2, "d_model": 16, "init_std": 0.4}
    return GPT(ModelConfig(**{"tied": False} | sizes | parts), generator=torch.Generator().manual_seed(3))


def session(model: GPT, **options: Any) -> ChatSession:
    return ChatSession(model, CHAT, Sampling(temperature=0.7), **{"max_new_tokens": 12, "seed": 5} | options)


def expected_answer(model: GPT, prompt: list[int], seed: int) -> list[int]:
    """Return the tokens that `generate` draws without a cache, without the one that stops it."""
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "seed": seed, "use_cache": False}
    tokens = generate(model, prompt, **options, stop=CHAT.stops, vocab_size=CHAT.vocab_size)
    drawn: list[int] = tokens[len(prompt) :].tolist()
    return drawn[:-1] if drawn[-1] in CHAT.stops else drawn


def second_answer(model: GPT, first: str) -> str:
    """Return the answer to "two", after that to "one"."""
    messages = [("user", "one"), ("assistant", first), ("user", "two")]
    prompt = [token for each in messages for token in CHAT.message(*each).tolist()]
    return CHAT.decode(expected_answer(model, [*prompt, CHAT.begin["assistant"]], seed=6))


@pytest.mark.parametrize("parts", [{}, {"positions": "rotary", "token_shift": True}], ids=["learned", "shifted"])
def test_turns_with_a_shared_cache_are_those_computed_from_all_messages(parts: dict[str, Any]) -> None:
    model = build(**parts)
    talk = session(model, system="S")
    prompt = CHAT.message("system", "S").tolist()
    for number, text in enumerate(("one", "two", "three")):
        prompt += [*CHAT.message("user", text).tolist(), CHAT.begin["assistant"]]
        answer = expected_answer(model, prompt, seed=5 + number)
        assert "".join(talk.answer(text)) == CHAT.decode(answer)
        prompt += [*answer, CHAT.end]
    assert [each["role"] for each in talk.messages] == ["system", *["user", "assistant"] * 3]


def test_oldest_turns_are_left_out_when_the_context_is_full_and_a_reset_forgets_all_but_the_system_message() -> None:
    model = build()
    talk = session(model, system="S")
    for number in range(8):
        "".join(talk.answer(f"message {number}"))
    assert talk.left_out > 0
    # A message that fills its part of the context leaves all earlier turns out, but not the system message.
    long = "x" * (96 - 12 - 3 - 3)
    answer = "".join(talk.answer(long))
    prompt = [*CHAT.message("system", "S").tolist(), *CHAT.message("user", long).tolist(), CHAT.begin["assistant"]]
    assert answer == CHAT.decode(expected_answer(model, prompt, seed=5 + 8))
    with pytest.raises(tensorkeep.UsageError, match="the message needs 85 tokens, with the system message, and 84 of"):
        talk.answer(long + "x")
    assert talk.messages[-1]["content"] == answer
    talk.reset()
    assert [each["role"] for each in talk.messages] == ["system"]
    assert "".join(talk.answer("two")) == "".join(session(model, system="S", seed=5 + 9).answer("two"))


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    whole = "".join(session(model).answer("one"))
    talk = session(model)
    real, calls = model.last_logits, 0

    def interrupted(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            # As within a forward pass, in which some layers have cached the token already.
            model.blocks[0].attention.forward(torch.zeros(1, 1, 16), None, arguments[1].layers[0])
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(model, "last_logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        "".join(talk.answer("one"))
    first = talk.messages[-1]["content"]
    assert first and whole.startswith(first)
    assert "".join(talk.answer("two")) == second_answer(model, first)


def test_an_answer_that_the_caller_stops_is_kept_and_one_ends_before_a_text_and_the_next_turn_continues() -> None:
    model = build()
    talk = session(model)
    talk.answer("zero")  # An answer that is never asked for adds nothing.
    assert talk.messages == []
    pieces = talk.answer("one")
    first = next(pieces)
    pieces.close()
    assert talk.messages[-1]["content"] == first
    assert "".join(talk.answer("two")) == second_answer(model, first)
    whole = "".join(session(model).answer("one"))
    stop = whole[3:5]
    talk = session(model, stop=[stop])
    shown = "".join(talk.answer("one"))
    assert shown == whole[: whole.index(stop)] == talk.messages[-1]["content"]
    # The next turn does not see the tokens of that text.
    assert "".join(talk.answer("two")) == second_answer(model, shown).partition(stop)[0]


def test_a_model_of_other_text_is_refused() -> None:
    with pytest.raises(tensorkeep.UsageError, match=r"not trained on conversations: its tokenizer \(byte\)"):
        ChatSession(build(), ByteTokenizer(documents=True), Sampling())
