"""Generation: which tokens are drawn, and which global state stays unchanged."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorkeep.errors import UsageError
from tensorkeep.train.generate import Sampling, generate, generate_stream
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.stop_texts import until

LAYOUTS = [
    pytest.param({"positions": "learned"}, id="learned"),
    pytest.param({"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}, id="rotary"),
    pytest.param({"positions": "rotary", "token_shift": "blocks", "convolution": 3}, id="shifted"),
]


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


@pytest.mark.parametrize("parts", LAYOUTS)
@pytest.mark.parametrize("prompt", [[3], [[1, 2, 3], [4, 5, 6]], list(range(11))], ids=["one", "two", "long"])
def test_generation_is_the_same_with_and_without_cache(parts: dict[str, Any], prompt: list[Any]) -> None:
    model = build(**parts)
    for temperature in (0.0, 0.8):  # 14 new tokens: past the context of 8
        with_cache = generate(model, prompt, max_new_tokens=14, temperature=temperature, seed=4)
        without = generate(model, prompt, max_new_tokens=14, temperature=temperature, seed=4, use_cache=False)
        assert torch.equal(with_cache, without)
        assert with_cache.shape[-1] == torch.tensor(prompt).shape[-1] + 14
        assert torch.equal(with_cache[..., :-14], torch.tensor(prompt))


def test_greedy_takes_the_likeliest_token_of_the_last_window() -> None:
    model = build()
    ids = generate(model, [1, 2, 3], max_new_tokens=12, temperature=0).tolist()
    for length in range(3, 15):
        with torch.no_grad():
            logits = model(torch.tensor([ids[max(0, length - 8) : length]]))[0, -1]
        assert ids[length] == logits.argmax().item()


def test_prompts_of_a_batch_are_independent() -> None:
    model = build()
    both = generate(model, [[1, 2], [7, 3]], max_new_tokens=10, temperature=0)
    assert torch.equal(both[0], generate(model, [1, 2], max_new_tokens=10, temperature=0))
    assert torch.equal(both[1], generate(model, [7, 3], max_new_tokens=10, temperature=0))


def test_seed_decides_the_draws() -> None:
    model = build()
    first = generate(model, [1], max_new_tokens=30, seed=1)
    assert torch.equal(first, generate(model, [1], max_new_tokens=30, seed=1))
    assert not torch.equal(first, generate(model, [1], max_new_tokens=30, seed=2))


def test_global_random_state_and_training_modes_are_unchanged() -> None:
    model = build(dropout=0.5).train()
    model.blocks[1].eval()
    before = torch.get_rng_state()
    generate(model, [1, 2], max_new_tokens=12)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.blocks[1].training
    assert not generate(model, [1], max_new_tokens=1).is_inference()


def test_no_dropout_while_generating() -> None:
    with_dropout = generate(build(dropout=0.5), [1, 2], max_new_tokens=12, temperature=0)
    assert torch.equal(with_dropout, generate(build(), [1, 2], max_new_tokens=12, temperature=0))


def test_draws_follow_the_probabilities() -> None:
    model = constant(build(bias=True, vocab_size=3), [math.log(0.5), math.log(0.3), math.log(0.2)])
    drawn = generate(model, [[0]] * 2000, max_new_tokens=2, use_cache=False)[:, 1:]
    # Four standard deviations of a share of 4,000 draws.
    for token, chance in enumerate((0.5, 0.3, 0.2)):
        share = (drawn == token).float().mean().item()
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / 4000)


def test_top_k_leaves_exactly_k() -> None:
    logits = [1.0, 3.0, 2.0, 3.0, 0.0]
    assert support(Sampling(top_k=1), logits) == [1]
    assert support(Sampling(top_k=2), logits) == [1, 3]
    assert support(Sampling(top_k=3), logits) == [1, 2, 3]
    assert support(Sampling(top_k=99), logits) == [0, 1, 2, 3, 4]
    assert support(Sampling(top_k=2), [0.0] * 5) == [0, 1]


def reference(
    logits: list[float], *, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[float]:
    """Return the probabilities token by token, as the papers define them."""
    weights = [math.exp(each / temperature) for each in logits]
    order = sorted(range(len(logits)), key=lambda each: -weights[each])[:top_k]
    chances = {each: weights[each] / sum(weights[each] for each in order) for each in order}
    if top_p is not None:
        nucleus, total = {}, 0.0
        for each in order:
            nucleus[each], total = chances[each], total + chances[each]
            if total >= top_p:
                break
        chances = {each: chance / total for each, chance in nucleus.items()}
    if min_p is not None:
        chances = {each: chance for each, chance in chances.items() if chance >= min_p * max(chances.values())}
    return [chances.get(each, 0.0) / sum(chances.values()) for each in range(len(logits))]


@given(
    # Apart by more than rounding.
    logits=st.lists(st.integers(-48, 48).map(lambda eighths: eighths / 8), min_size=1, max_size=12, unique=True),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0.05, 0.999),
    min_p=st.none() | st.floats(0, 1),
)
def test_probabilities_are_those_of_the_definitions(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p)
    found = sampling.probabilities(torch.tensor([logits], dtype=torch.float64))[0].tolist()
    expected = reference(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert found == pytest.approx(expected, abs=1e-9)


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [math.log(chance) for chance in (0.5, 0.26, 0.24)]
    assert support(Sampling(min_p=0.5), logits) == [0, 1]
    assert support(Sampling(min_p=1), logits) == [0]
    assert support(Sampling(min_p=0), logits) == [0, 1, 2]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    assert sampling.choose(logits, generator).tolist() == [0]
    assert sampling.choose(logits, generator, torch.tensor([[0, 0, 2]])).tolist() == [1]
    # Penalised once, however often a token occurs: -2 is below -1.5.
    negative = torch.tensor([[-1.0, -1.5]])
    assert sampling.choose(negative, generator, torch.tensor([[0, 0, 0]])).tolist() == [1]
    assert Sampling(temperature=0, repetition_penalty=1.4).choose(
        negative, generator, torch.tensor([[0, 0]])
    ).tolist() == [0]


def test_padding_of_the_vocabulary_is_penalised_as_no_other_token() -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    assert sampling.choose(torch.tensor([[1.5, 2.0]]), generator, torch.tensor([[2, 7]])).tolist() == [1]


def test_tokens_that_end_a_sequence_are_not_penalised() -> None:
    """The likeliest token is drawn again and again with a penalty, if it may end the sequence."""
    model = build()
    likeliest = int(generate(model, [1], max_new_tokens=1, temperature=0)[-1])
    options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0, "repetition_penalty": 100.0}
    prompt = [1, likeliest]
    again = int(generate(model, prompt, max_new_tokens=1, temperature=0)[-1])
    assert int(generate(model, [*prompt, again], **{**options, "repetition_penalty": 1.0})[-1]) == int(
        generate(model, [*prompt, again], **options, stop=range(model.config.vocab_size))[-1]
    )


@pytest.mark.parametrize("penalty", [0.0, 1e-300, 0.009, 101.0, math.inf, math.nan])
def test_repetition_penalties_out_of_bounds_are_refused(penalty: float) -> None:
    with pytest.raises(UsageError, match="repetition_penalty is"):
        Sampling(repetition_penalty=penalty)


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_no_repetition_penalty_overflows(penalty: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0]])
    sampling = Sampling(repetition_penalty=penalty)
    assert sampling.choose(logits, torch.Generator().manual_seed(0), torch.tensor([[0, 1]])).tolist() == [0]


def test_repetition_penalty_applies_to_all_tokens_so_far() -> None:
    model = build()
    ids = generate(model, [1, 2], max_new_tokens=9, temperature=0, repetition_penalty=100).tolist()
    # As long as there is another token with a positive logit, or all have the same penalty, none is repeated.
    assert len(set(ids[:6])) == 6
    plain = generate(model, [1, 2], max_new_tokens=9, temperature=0).tolist()
    assert plain == generate(model, [1, 2], max_new_tokens=9, temperature=0, repetition_penalty=1.0).tolist()


@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
    st.data(),
)
def test_text_ends_before_the_first_stop_however_it_is_cut(text: str, stops: list[str], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    # The stop that ends first decides, as it does while the text is generated; the text before it is that of the first
    # place at which any stop occurs by then.
    found = "".join(until(pieces, stops))
    assert text.startswith(found)
    assert not any(stop in found for stop in stops)
    assert found == text or any(text[len(found) :].startswith(stop) for stop in stops)


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    logits = [math.log(chance) for chance in (0.15, 0.5, 0.05, 0.3)]
    assert support(Sampling(top_p=0.01), logits) == [1]
    assert support(Sampling(top_p=0.49), logits) == [1]
    assert support(Sampling(top_p=0.51), logits) == [1, 3]
    assert support(Sampling(top_p=0.79), logits) == [1, 3]
    assert support(Sampling(top_p=0.81), logits) == [0, 1, 3]
    assert support(Sampling(top_p=0.96), logits) == [0, 1, 2, 3]
    # Quarters are exact: two of them reach one half, and a third one is not needed.
    assert support(Sampling(top_p=0.5), [0.0] * 4) == [0, 1]
    assert support(Sampling(top_p=0.5000001), [0.0] * 4) == [0, 1, 2]
    assert support(Sampling(top_p=1.0), [0.0] * 3 + [-40.0]) == [0, 1, 2, 3]


def test_top_p_is_applied_after_top_k() -> None:
    logits = [math.log(chance) for chance in (0.4, 0.3, 0.2, 0.1)]
    # Of the first two, the first has 4/7.
    assert support(Sampling(top_k=2, top_p=0.57), logits) == [0]
    assert support(Sampling(top_k=2, top_p=0.58), logits) == [0, 1]


@given(
    # Equal, or apart by more than rounding.
    logits=st.lists(st.integers(-240, 240).map(lambda eighths: eighths / 8), min_size=2, max_size=12),
    temperature=st.floats(1e-3, 10),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.01, 1),
)
def test_probabilities_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    enough, reached = (math.inf if top_p in (None, 1) else top_p) * sum(weights.values()), 0.0
    sure, possible = set(), set()
    for token in order:
        if reached < enough * (1 + 1e-9):
            possible.add(token)
        # A share that is nothing in double precision may be missing.
        if reached < enough * (1 - 1e-9) and weights[token] > 1e-290:
            sure.add(token)
        reached += weights[token]
    probabilities = Sampling(temperature, top_k, top_p).probabilities(torch.tensor([logits]))[0]
    found = set(support(Sampling(temperature, top_k, top_p), logits))
    assert sure <= found <= possible
    assert probabilities.sum().item() == pytest.approx(1)
    for token in found:
        assert probabilities[token].item() == pytest.approx(weights[token] / sum(weights[each] for each in found))


@pytest.mark.parametrize("temperature", [5e-324, 1e-8, 1e8])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    probabilities = Sampling(temperature).probabilities(torch.tensor([[3.0, 88.0, -1e30, 87.0]]))
    assert probabilities.isfinite().all()
    assert probabilities.sum().item() == pytest.approx(1)
    assert probabilities.argmax().item() == 1


def test_generation_ends_at_a_stop_token() -> None:
    model = build()
    whole = generate(model, [1], max_new_tokens=40, seed=3).tolist()
    stop = whole[20]
    end = whole.index(stop, 1)
    assert generate(model, [1], max_new_tokens=40, seed=3, stop=stop).tolist() == whole[: end + 1]
    assert generate(model, [1], max_new_tokens=40, seed=3, stop={stop}).tolist() == whole[: end + 1]
    assert generate(model, [stop], max_new_tokens=1, stop=stop).shape == (2,)


def test_ended_sequence_is_padded_until_all_have_ended() -> None:
    model = build()
    whole = generate(model, [[1], [2], [3]], max_new_tokens=60, seed=1)
    ended = generate(model, [[1], [2], [3]], max_new_tokens=60, seed=1, stop=[4, 5])
    ends = [next(i for i in range(1, 61) if row[i] in (4, 5)) for row in whole.tolist()]
    assert len(set(ends)) > 1
    assert ended.shape == (3, max(ends) + 1)
    for row, wanted, end in zip(ended, whole, ends, strict=True):
        assert torch.equal(row[: end + 1], wanted[: end + 1])
        assert set(row[end:].tolist()) == {int(wanted[end])}


def test_on_token_receives_each_token_as_it_is_drawn() -> None:
    model, seen = build(), []
    ids = generate(model, [[1, 2], [3, 4]], max_new_tokens=5, on_token=seen.append)
    assert seen == ids[:, 2:].T.tolist()


def test_stream_yields_the_tokens_of_generate() -> None:
    model = build()
    model.train()
    stream = generate_stream(model, [[1, 2], [3, 4]], max_new_tokens=5, seed=2)
    assert iter(stream) is stream
    found = []
    for tokens in stream:
        assert torch.is_grad_enabled() and model.training
        found.append(tokens)
    assert found == generate(model, [[1, 2], [3, 4]], max_new_tokens=5, seed=2)[:, 2:].T.tolist()
    assert list(generate_stream(model, [1], max_new_tokens=0)) == []


def test_stream_refuses_invalid_arguments_when_it_is_called() -> None:
    with pytest.raises(UsageError, match="max_new_tokens is -1"):
        generate_stream(build(), [1], max_new_tokens=-1)


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.uint16), torch.tensor([1, 2, 3], dtype=torch.int32)],
    ids=["list", "tuple", "array", "tensor"],
)
def test_prompt_may_be_any_kind_of_sequence(prompt: Any) -> None:
    ids = generate(build(), prompt, max_new_tokens=0)
    assert ids.tolist() == [1, 2, 3]
    assert ids.dtype == torch.int64


def test_prompt_in_read_only_memory_gives_no_warning() -> None:
    prompt = np.array([1, 2, 3], np.uint16)
    prompt.flags.writeable = False
    assert generate(build(), prompt, max_new_tokens=2).shape == (5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, r"the prompt has the shape \[0\]"),
        ({"prompt_ids": [[[1]]]}, r"the prompt has the shape \[1, 1, 1\]"),
        ({"prompt_ids": [[1, 2], [3]]}, "not an array of token ids"),
        ({"prompt_ids": ["a"]}, "not an array of token ids"),
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
        ({"seed": -1}, "the seed is -1"),
        ({"stop": 11}, "stop has the token 11"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        generate(build(), **{"prompt_ids": [1], "max_new_tokens": 3, **arguments})
    assert caught.value.remedy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nonfinite_logits_are_reported(temperature: float) -> None:
    model = build()
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    with pytest.raises(UsageError, match="logits for token 2 are not finite"):
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


def test_padding_tokens_of_the_vocabulary_are_never_drawn() -> None:
    model = constant(build(norm_eps=1e-5, bias=True), [0.0, 1.0, 0.5, *([9.0] * 8)])
    for temperature in (0.0, 2.0):
        drawn = generate(model, [0], max_new_tokens=40, temperature=temperature, vocab_size=3)
        assert drawn.max() < 3
    assert generate(model, [0], max_new_tokens=1, temperature=0.0)[1] >= 3
