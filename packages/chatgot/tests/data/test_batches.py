"""Batches: each is a function of the seed and its number only."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatgot.data.batches import Batches, RandomNumbers, shuffled_offsets
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case

TEXT = np.arange(1000, dtype=np.uint16)
ORDERS = ["random", "shuffled"]


def batches(tokens: Any = TEXT, **changed: Any) -> Batches:
    return Batches(tokens, **{"context_length": 8, "batch_size": 4, "seed": 7, **changed})


def rows(drawn: Batches, count: int) -> torch.Tensor:
    return torch.cat([inputs for inputs, _ in islice(drawn, count)])


@pytest.mark.parametrize("order", ORDERS)
def test_targets_are_the_inputs_shifted_by_one_token_and_iterating_matches_indexing(order: str) -> None:
    drawn = list(islice(batches(order=order), 300))
    for inputs, targets in drawn:
        assert inputs.shape == targets.shape == (4, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous() and targets.is_contiguous()
        assert torch.equal(targets, inputs + 1)  # the text counts
    again = batches(order=order)
    for position in (199, 0, 64, 63, 65, 130):
        assert torch.equal(again.at(position)[0], drawn[position][0])
    assert again.position == 0
    seeds = [rows(batches(order=order, seed=seed), 10) for seed in (0, 1, 2**64 - 1)]
    assert not torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[1], seeds[2])
    # The shortest possible text.
    assert torch.equal(next(batches(TEXT[:9], order=order))[0], torch.arange(8).expand(4, 8))
    with pytest.raises(UsageError, match="the text has 8 tokens, and a context of 8 needs 9"):
        batches(TEXT[:8], order=order)


@given(st.sampled_from(ORDERS), st.integers(0, 3000), st.integers(1, 70), st.integers(0, 2**64 - 1))
def test_resuming_at_any_batch_continues_the_sequence(order: str, position: int, batch_size: int, seed: int) -> None:
    settings = {"order": order, "batch_size": batch_size, "seed": seed}
    first, second = batches(**settings), batches(**settings)
    first.position = position
    next(first)
    state = first.state_dict()
    assert state == {"position": position + 1}
    second.load_state_dict(state)
    for batch, same in islice(zip(first, second, strict=True), 3):
        assert all(torch.equal(*pair) for pair in zip(batch, same, strict=True))


@given(st.integers(9, 400), st.integers(1, 8), st.integers(0, 100), st.integers(1, 12))
def test_shuffled_epoch_has_every_window_once(tokens: int, context_length: int, seed: int, batch_size: int) -> None:
    offsets = shuffled_offsets(tokens, context_length, seed)
    grids = []
    for epoch in range(3):
        begins = np.sort(offsets.take(epoch * offsets.count, offsets.count))
        assert (np.diff(begins) == context_length).all()
        assert 0 <= begins[0] <= begins[-1] < tokens - context_length
        assert tokens - offsets.count * context_length <= 2 * context_length
        grids.append(begins[0])
    text = np.arange(tokens, dtype=np.uint16)
    drawn = batches(text, context_length=context_length, seed=seed, batch_size=batch_size, order="shuffled")
    seen = rows(drawn, -(-offsets.count // batch_size))[: offsets.count, 0]
    assert sorted(seen.tolist()) == np.sort(offsets.take(0, offsets.count)).tolist()


def test_each_epoch_has_another_order_and_another_grid_and_follows_the_one_before() -> None:
    offsets = shuffled_offsets(10_000, 64, 1)
    epochs = [offsets.take(epoch * offsets.count, offsets.count) for epoch in range(8)]
    assert len({int(epoch.min()) for epoch in epochs}) > 4
    orders = {tuple(np.argsort(epoch)) for epoch in epochs}
    assert len(orders) == 8
    assert tuple(range(offsets.count)) not in orders
    # A batch may be larger than an epoch.
    offsets = shuffled_offsets(30, 8, 1)
    assert offsets.count == 2
    together = shuffled_offsets(30, 8, 1).take(0, 7)
    assert together.tolist() == [int(offsets.take(place, 1)[0]) for place in range(7)]
    # The order of an epoch takes four bytes a window.
    offsets = shuffled_offsets(1_000_000, 8, 1)
    offsets.take(0, 1)
    assert offsets._order.nbytes == 4 * offsets.count


def test_random_offsets_cover_the_whole_text_however_they_are_taken_and_are_pinned() -> None:
    counts = np.bincount(RandomNumbers(12, 3).take(0, 120_000))
    assert len(counts) == 12
    assert 9_500 < counts.min() <= counts.max() < 10_500
    offsets = RandomNumbers(9_992, 3)
    whole = offsets.take(0, 10_000)
    assert np.array_equal(np.concatenate([offsets.take(at, 1000) for at in range(0, 10_000, 1000)]), whole)
    stream = np.random.Philox(key=3).random_raw(10_000)
    assert np.array_equal(whole, (stream % np.uint64(9992)).astype(np.int64))
    assert RandomNumbers(999_936, 42).take(5000, 4).tolist() == [339158, 353465, 578355, 306580]
    assert shuffled_offsets(1_000_000, 64, 42).take(20_000, 4).tolist() == [143560, 795336, 981064, 792136]


def test_invalid_arguments_and_states_are_refused() -> None:
    invalid: list[tuple[dict[str, Any], str]] = [
        ({"order": "sorted"}, "there is no order 'sorted'"),
        ({"context_length": 0}, "the context length is 0"),
        ({"batch_size": -1}, "the batch size is -1"),
        ({"seed": -1}, "the seed is -1"),
        ({"seed": 1 << 64}, "the seed is"),
    ]
    for changed, message in invalid:
        with case(changed), pytest.raises(UsageError, match=message):
            batches(**changed)
    drawn = batches()
    for state in ({}, {"position": -1}, {"position": "3"}, {"position": 1.0}, {"position": True}):
        with case(state), pytest.raises(UsageError, match="the position of the batches is"):
            drawn.load_state_dict(state)
        assert drawn.position == 0


def test_drawing_changes_neither_the_text_nor_earlier_batches() -> None:
    text = TEXT.copy()
    drawn = batches(text)
    inputs, _ = next(drawn)
    kept = inputs.clone()
    next(drawn)
    assert torch.equal(inputs, kept)
    inputs.zero_()
    assert np.array_equal(text, TEXT)
    large, _ = next(batches(np.arange(100, dtype=np.uint32) + 100_000))
    assert int(large.min()) >= 100_000


class ReadWindows:
    """Counts the windows that are read."""

    def __init__(self, windows: Any) -> None:
        self.windows = windows
        self.count = 0

    def __getitem__(self, begins: Any) -> Any:
        self.count += len(begins)
        return self.windows[begins]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_parts_together_draw_the_rows_of_a_batch_and_read_each_once(order: Any, parts: int) -> None:
    def new() -> Batches:
        return Batches(TEXT, context_length=4, batch_size=6, seed=3, order=order)

    whole, shares = new(), [new() for _ in range(parts)]
    counters = []
    for part, share in enumerate(shares):
        share.draw_part(part, parts)
        share._windows = ReadWindows(share._windows)  # type: ignore[assignment]
        counters.append(share._windows)
    for _ in range(40):
        drawn = [next(share) for share in shares]
        for found, expected in zip(zip(*drawn, strict=True), next(whole), strict=True):
            assert torch.equal(torch.cat(found), expected)
    # Inputs and targets of 6 rows in 40 batches.
    assert [each.count for each in counters] == [2 * 6 * 40 // parts] * parts
    assert {share.position for share in shares} == {whole.position}


def test_part_of_a_batch_resumes_at_its_position() -> None:
    first, again = batches(), batches()
    for each in (first, again):
        each.draw_part(1, 2)
    expected = [next(first) for _ in range(5)][4]
    again.load_state_dict({"position": 4})
    assert all(torch.equal(*pair) for pair in zip(next(again), expected, strict=True))
    with pytest.raises(UsageError, match="4 sequences cannot be split equally among 3 processes"):
        batches().draw_part(0, 3)
