"""Exact tilings: what random cuts make is accepted, and any single change of it is refused."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulated_ranks import random_tiling
from tensorkeep.formats.boxes import Flaw, find_flaw

SHAPES = [(), (1,), (7,), (4, 6), (3, 5, 4), (2, 3, 2, 5)]


def first_flaw(shape, boxes) -> Flaw | None:
    """Count the boxes over every element, one by one."""
    for element in itertools.product(*map(range, shape)):
        count = sum(all(o <= at < o + s for o, s, at in zip(*box, element, strict=True)) for box in boxes)
        if count != 1:
            return Flaw(element, count == 0)
    return None


@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32))
def test_random_tilings_are_accepted_and_every_change_is_found(shape: tuple[int, ...], seed: int) -> None:
    random = Random(seed)
    boxes = random_tiling(random, shape, cuts=random.randrange(8))
    random.shuffle(boxes)
    assert find_flaw(shape, boxes) is None
    number = random.randrange(len(boxes))
    changes = [boxes[:number] + boxes[number + 1 :], [*boxes, boxes[number]]]
    offsets, sizes = boxes[number]
    for axis, length in enumerate(shape):
        for moved, grown in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            offset, size = offsets[axis] + moved, sizes[axis] + grown
            if offset >= 0 and size > 0 and offset + size <= length:
                one = (*offsets[:axis], offset, *offsets[axis + 1 :]), (*sizes[:axis], size, *sizes[axis + 1 :])
                changes.append([*boxes[:number], one, *boxes[number + 1 :]])
    for changed in changes:
        assert find_flaw(shape, changed) == first_flaw(shape, changed) is not None


def test_equal_volumes_empty_arrays_and_scalars() -> None:
    # A gap and an overlap of one size.
    boxes = [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((1, 2), (2, 2))]
    assert find_flaw((4, 4), boxes) == Flaw((1, 2), is_gap=False)
    assert find_flaw((3, 0), []) is None
    assert find_flaw((3,), []) == Flaw((0,), is_gap=True)
    assert find_flaw((), []) == Flaw((), is_gap=True)
    assert find_flaw((), [((), ()), ((), ())]) == Flaw((), is_gap=False)
    # What no mesh has, or would exceed the memory, is refused.
    with pytest.raises(ValueError, match="along 9 dimensions"):
        find_flaw((2,) * 9, [((0,) * 9, (1,) * 9)])
    assert find_flaw((2, *(1,) * 60), [((0,) * 61, (2, *(1,) * 60))]) is None
    with pytest.raises(OverflowError, match="has a length of"):
        find_flaw((2**63,), [((0,), (2**63,))])
    with pytest.raises(ValueError, match="into 20,000 boxes, more than can be checked"):
        find_flaw((2,) * 8, [((0,) * 8, (1,) * 8)] * 20_000)
