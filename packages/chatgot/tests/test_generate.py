"""Generation: which tokens are drawn, and which global state stays unchanged."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chatgot.generate import Sampling, generate, generate_stream, until_stop
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case


def build(**parts: Any) -> GPT:
    sizes = {"vocab_size": 11, "context_length": 8, "n_layers": 2, "n_heads": 2, "d_model": 8, "init_std": 0.6}
    return GPT(ModelConfig(**{"tied": False} | sizes | parts), generator=torch.Generator().manual_seed(0))


def support(sampling: Sampling, logits: list[float]) -> list[int]:
    """Return the tokens that may be drawn."""
    return torch.nonzero(sampling.probabilities(torch.tensor([logits]))[0]).flatten().tolist()


def constant(model: GPT, logits: list[float]) -> GPT:
    """Let a model predict the same token for every input."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.weight[:, 0] = torch.tensor(logits)
        model.norm.bias[0] = 1
    return model


@pytest.mark.parametrize(
    "parts",
    [
        {"positions": "learned"},
        {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"},
        {"positions": "rotary", "token_shift": "blocks", "convolution": 3},
    ],
    ids=str,
)
def test_generation_is_the_same_with_and_without_cache(parts: dict[str, Any]) -> None:
    model = build(**parts)
    prompts: list[Any] = [[3], [[1, 2, 3], [4, 5, 6]], list(range(11))]
    for prompt, temperature in itertools.product(prompts, (0.0, 0.8)):
        with case((prompt, temperature)):
            # 9 new tokens: past the context of 8.
            with_cache, without = (
                generate(model, prompt, max_new_tokens=9, temperature=temperature, seed=4, use_cache=use_cache)
                for use_cache in (True, False)
            )
            assert torch.equal(with_cache, without)
            assert with_cache.shape[-1] == torch.tensor(prompt).shape[-1] + 9
            assert torch.equal(with_cache[..., :-9], torch.tensor(prompt))


def test_greedy_takes_the_likeliest_token_prompts_are_independent_and_the_seed_decides_the_draws() -> None:
    model = build()
    ids = generate(model, [1, 2, 3], max_new_tokens=12, temperature=0).tolist()
    for length in range(3, 15):
        with torch.no_grad():
            logits = model(torch.tensor([ids[max(0, length - 8) : length]]))[0, -1]
        assert ids[length] == logits.argmax().item()
    both = generate(model, [[1, 2], [7, 3]], max_new_tokens=10, temperature=0)
    assert torch.equal(both[0], generate(model, [1, 2], max_new_tokens=10, temperature=0))
    assert torch.equal(both[1], generate(model, [7, 3], max_new_tokens=10, temperature=0))
    first = generate(model, [1], max_new_tokens=30, seed=1)
    assert torch.equal(first, generate(model, [1], max_new_tokens=30, seed=1))
    assert not torch.equal(first, generate(model, [1], max_new_tokens=30, seed=2))


def test_global_random_state_and_training_modes_are_unchanged_and_nothing_is_dropped() -> None:
    model = build(dropout=0.5).train()
    model.blocks[1].eval()
    before = torch.get_rng_state()
    ids = generate(model, [1, 2], max_new_tokens=12, temperature=0)
    assert torch.equal(ids, generate(build(), [1, 2], max_new_tokens=12, temperature=0))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.blocks[1].training
    assert not generate(model, [1], max_new_tokens=1).is_inference()


def test_tokens_that_may_be_drawn() -> None:
    logits = [1.0, 3.0, 2.0, 3.0, 0.0]
    chances = [math.log(chance) for chance in (0.15, 0.5, 0.05, 0.3)]
    thirds = [math.log(chance) for chance in (0.5, 0.26, 0.24)]
    cases: list[tuple[list[float], dict[str, Any], list[int]]] = [
        *((logits, {"top_k": k}, kept) for k, kept in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (99, [0, 1, 2, 3, 4]))),
        ([0.0] * 5, {"top_k": 2}, [0, 1]),
        # The token that reaches the share is kept.
        *((chances, {"top_p": share}, [1]) for share in (0.01, 0.49)),
        *((chances, {"top_p": share}, [1, 3]) for share in (0.51, 0.79)),
        (chances, {"top_p": 0.81}, [0, 1, 3]),
        (chances, {"top_p": 0.96}, [0, 1, 2, 3]),
        # Quarters are exact: two of them reach one half, and a third one is not needed.
        ([0.0] * 4, {"top_p": 0.5}, [0, 1]),
        ([0.0] * 4, {"top_p": 0.5000001}, [0, 1, 2]),
        ([0.0] * 3 + [-40.0], {"top_p": 1.0}, [0, 1, 2, 3]),
        # Of the two that top_k keeps, the first one has 0.5 of 0.8.
        (chances, {"top_k": 2, "top_p": 0.62}, [1]),
        (chances, {"top_k": 2, "top_p": 0.63}, [1, 3]),
        # min_p is relative to the likeliest token.
        *((thirds, {"min_p": least}, kept) for least, kept in ((0.5, [0, 1]), (1, [0]), (0, [0, 1, 2]))),
    ]
    for given_logits, settings, expected in cases:
        assert support(Sampling(**settings), given_logits) == expected, (given_logits, settings)
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    assert sampling.choose(logits, generator).tolist() == [0]
    assert sampling.choose(logits, generator, torch.tensor([[0, 0, 2]])).tolist() == [1]
    # Penalised once, however often a token occurs: -2 is below -1.5.
    negative = torch.tensor([[-1.0, -1.5]])
    assert sampling.choose(negative, generator, torch.tensor([[0, 0, 0]])).tolist() == [1]
    weak = Sampling(temperature=0, repetition_penalty=1.4)
    assert weak.choose(negative, generator, torch.tensor([[0, 0]])).tolist() == [0]
    # Padding of the vocabulary (token 7 of 2) is penalised as no other token.
    assert sampling.choose(torch.tensor([[1.5, 2.0]]), generator, torch.tensor([[2, 7]])).tolist() == [1]
    # No penalty overflows.
    for penalty in (0.01, 100.0):
        large, so_far = torch.tensor([[3e38, -3e38, 1.0]]), torch.tensor([[0, 1]])
        assert Sampling(repetition_penalty=penalty).choose(large, generator, so_far).tolist() == [0], penalty


def test_repetition_penalty_applies_to_all_tokens_so_far_but_those_that_end_a_sequence() -> None:
    model, greedy = build(), {"max_new_tokens": 9, "temperature": 0}
    ids = generate(model, [1, 2], **greedy, repetition_penalty=100).tolist()
    # As long as there is another token with a positive logit, or all have the same penalty, none is repeated.
    assert len(set(ids[:6])) == 6
    plain = generate(model, [1, 2], **greedy).tolist()
    assert plain == generate(model, [1, 2], **greedy, repetition_penalty=1.0).tolist()
    # The likeliest token is drawn again and again with a penalty, if it may end the sequence.
    one: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
    prompt = [1, int(generate(model, [1], **one)[-1])]
    prompt.append(int(generate(model, prompt, **one)[-1]))
    any_token = range(model.config.vocab_size)
    likeliest = generate(model, prompt, **one, repetition_penalty=1.0)
    assert torch.equal(generate(model, prompt, **one, repetition_penalty=100.0, stop=any_token), likeliest)


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3), st.data())
def test_text_ends_before_the_first_stop_however_it_is_cut(text: str, stops: list[str], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    # The stop that ends first decides, as it does while the text is generated; the text before it is that of the first
    # place at which any stop occurs by then.
    found = "".join(until_stop(pieces, stops))
    assert text.startswith(found)
    assert not any(stop in found for stop in stops)
    assert found == text or any(text[len(found) :].startswith(stop) for stop in stops)


@given(
    # Equal, or apart by more than rounding.
    logits=st.lists(st.integers(-240, 240).map(lambda eighths: eighths / 8), min_size=2, max_size=12),
    temperature=st.floats(1e-3, 10),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_probabilities_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    # The weight of the likeliest token is 1.
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    enough, reached = (math.inf if top_p in (None, 1) else top_p) * sum(weights.values()), 0.0
    least = min_p or 0.0
    sure, possible = {order[0]}, set()
    for token in order:
        if reached < enough * (1 + 1e-9) and weights[token] >= least * (1 - 1e-6):
            possible.add(token)
        # A share that is nothing in double precision may be missing.
        if reached < enough * (1 - 1e-9) and weights[token] > max(1e-290, least * (1 + 1e-6)):
            sure.add(token)
        reached += weights[token]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities, found = sampling.probabilities(torch.tensor([logits]))[0], set(support(sampling, logits))
    assert sure <= found <= possible
    assert probabilities.sum().item() == pytest.approx(1)
    for token in found:
        assert probabilities[token].item() == pytest.approx(weights[token] / sum(weights[each] for each in found))


def test_extreme_temperatures_do_not_overflow() -> None:
    for temperature in (5e-324, 1e-8, 1e8):
        probabilities = Sampling(temperature=temperature).probabilities(torch.tensor([[3.0, 88.0, -1e30, 87.0]]))
        assert probabilities.isfinite().all(), temperature
        assert probabilities.sum().item() == pytest.approx(1), temperature
        assert probabilities.argmax().item() == 1, temperature


def test_generation_ends_at_a_stop_token_and_an_ended_sequence_is_padded_until_all_have_ended() -> None:
    model = build()
    whole = generate(model, [1], max_new_tokens=40, seed=3).tolist()
    token = whole[20]
    for stop in (token, {token}):
        found = generate(model, [1], max_new_tokens=40, seed=3, stop=stop).tolist()
        assert found == whole[: whole.index(token, 1) + 1]
    assert generate(model, [token], max_new_tokens=1, stop=token).shape == (2,)
    rows = generate(model, [[1], [2], [3]], max_new_tokens=60, seed=1)
    ended = generate(model, [[1], [2], [3]], max_new_tokens=60, seed=1, stop=[4, 5])
    ends = [next(i for i in range(1, 61) if row[i] in (4, 5)) for row in rows.tolist()]
    assert len(set(ends)) > 1
    assert ended.shape == (3, max(ends) + 1)
    for row, wanted, end in zip(ended, rows, ends, strict=True):
        assert torch.equal(row[: end + 1], wanted[: end + 1])
        assert set(row[end:].tolist()) == {int(wanted[end])}


def test_stream_yields_and_on_token_receives_the_tokens_of_generate() -> None:
    model = build().train()
    stream = generate_stream(model, [[1, 2], [3, 4]], max_new_tokens=5, seed=2)
    assert iter(stream) is stream
    found = []
    for tokens in stream:
        assert torch.is_grad_enabled() and model.training
        found.append(tokens)
    received: list[list[int]] = []
    ids = generate(model, [[1, 2], [3, 4]], max_new_tokens=5, seed=2, on_token=received.append)
    assert found == received == ids[:, 2:].T.tolist()
    assert list(generate_stream(model, [1], max_new_tokens=0)) == []
    with pytest.raises(UsageError, match="max_new_tokens is -1"):
        generate_stream(model, [1], max_new_tokens=-1)


def test_prompt_may_be_any_kind_of_sequence() -> None:
    array, read_only = np.array([1, 2, 3], np.uint16), np.array([1, 2, 3], np.uint16)
    read_only.flags.writeable = False  # torch would warn of it
    for prompt in ([1, 2, 3], (1, 2, 3), array, read_only, torch.tensor([1, 2, 3], dtype=torch.int32)):
        ids = generate(build(), prompt, max_new_tokens=0)
        assert (ids.tolist(), ids.dtype) == ([1, 2, 3], torch.int64)


def test_settings_of_sampling_may_be_numbers_of_numpy() -> None:
    settings: dict[str, Any] = {"temperature": np.float64(0.5), "top_k": np.int64(3), "top_p": np.float32(0.75)}
    assert repr(Sampling(**settings)) == repr(Sampling(temperature=0.5, top_k=3, top_p=0.75))


def test_invalid_arguments_and_nonfinite_logits_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt_ids": []}, r"the prompt has the shape \[0\]"),
        ({"prompt_ids": [[[1]]]}, r"the prompt has the shape \[1, 1, 1\]"),
        *(({"prompt_ids": each}, "not an array of token ids") for each in ([[1, 2], [3]], ["a"])),
        ({"prompt_ids": [1.5]}, "of torch.float32"),
        ({"prompt_ids": [True]}, "of torch.bool"),
        ({"prompt_ids": [3, 11]}, "has the token 11, and the model has tokens 0 to 10"),
        ({"prompt_ids": [-1]}, "has the token -1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        *(({"repetition_penalty": each}, "repetition_penalty is") for each in (0.0, 1e-300, 0.009, 101.0)),
        *(({"repetition_penalty": each}, "repetition_penalty is") for each in (math.inf, math.nan)),
        ({"seed": -1}, "the seed is -1"),
        ({"stop": 11}, "stop has the token 11"),
    ]
    model = build()
    for arguments, message in refused:
        with case(arguments):
            with pytest.raises(UsageError, match=message) as caught:
                generate(model, **{"prompt_ids": [1], "max_new_tokens": 3, **arguments})
            assert caught.value.remedy
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    for temperature in (0.0, 1.0):
        with case(temperature), pytest.raises(UsageError, match="logits for token 2 are not finite"):
            generate(model, [1, 2], max_new_tokens=3, temperature=temperature)


def test_custom_attention_kernel_is_used_with_the_cache() -> None:
    model, masks = build(), []

    def kernel(query: Tensor, key: Tensor, value: Tensor, /, **options: Any) -> Tensor:
        masks.append((query.shape[2], key.shape[2], options["is_causal"]))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    wanted = generate(model, [1, 2, 3], max_new_tokens=4, temperature=0)
    for block in model.blocks:
        block.attention.kernel = kernel
    assert torch.equal(generate(model, [1, 2, 3], max_new_tokens=4, temperature=0), wanted)
    assert masks[::2] == [(3, 3, True), (1, 4, False), (1, 5, False), (1, 6, False)]


def test_draws_follow_the_probabilities_and_padding_tokens_of_the_vocabulary_are_never_drawn() -> None:
    model = constant(build(bias=True, vocab_size=3), [math.log(0.5), math.log(0.3), math.log(0.2)])
    drawn = generate(model, [[0]] * 2000, max_new_tokens=2, use_cache=False)[:, 1:]
    # Four standard deviations of a share of 4,000 draws.
    for token, chance in enumerate((0.5, 0.3, 0.2)):
        share = (drawn == token).float().mean().item()
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / 4000)
    model = constant(build(norm_eps=1e-5, bias=True), [0.0, 1.0, 0.5, *([9.0] * 8)])
    for temperature in (0.0, 2.0):
        drawn = generate(model, [0], max_new_tokens=40, temperature=temperature, vocab_size=3)
        assert drawn.max() < 3
    assert generate(model, [0], max_new_tokens=1, temperature=0.0)[1] >= 3
