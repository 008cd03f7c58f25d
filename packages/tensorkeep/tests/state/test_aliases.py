"""Shared storage is stored once and restored as shared; hostile views are refused."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from state.reloading import reload
from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.state.tree import flatten
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference


def test_tied_parameters_are_one_object_again() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    state = {"wte": weight, "head": weight, "frozen": torch.nn.Parameter(weight.detach(), requires_grad=False)}
    flat = flatten(state)
    assert (list(flat.leaves), flat.aliases["head"]) == (["wte"], Alias("wte", 0, (3, 2), (2, 1)))
    back = reload(flat)
    assert difference(state, back) is None
    assert back["wte"] is back["head"]
    assert back["frozen"] is not back["wte"]
    assert back["frozen"].data_ptr() == back["wte"].data_ptr()


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    *(lambda w: w[1:3], lambda w: w[2], lambda w: w[::2, 1::2], lambda w: w[3, 1], lambda w: w.T),
    *(lambda w: w.reshape(-1), lambda w: w[:1].expand(5, 6), lambda w: w.reshape(2, 2, 6).permute(2, 0, 1)),
]


def test_views_inside_a_leaf_share_memory_after_loading() -> None:
    for number, view in enumerate(VIEWS):
        base = torch.arange(24.0).reshape(4, 6)
        for state in ({"base": base, "view": view(base)}, {"view": view(base), "base": base}):
            flat = flatten(state)
            smaller = view(base).numel() < 24 or view(base).stride() != (1,)
            with case(f"view {number}, {[*state]}"):
                assert set(flat.leaves) == ({"base"} if smaller else {next(iter(state))})
                back = reload(flat)
                assert difference(state, back) is None
                back["base"].fill_(7.0)
                assert bool((back["view"] == 7).all())
                assert back["view"].stride() == state["view"].stride()


def test_numpy_views_share_memory_after_loading() -> None:
    base = np.arange(12.0).reshape(3, 4)
    state = {"base": base, "reversed": base[::-1, ::-2], "row": base[1], "column": base[:, 2]}
    flat = flatten(state)
    assert (list(flat.leaves), flat.aliases["reversed"].strides) == (["base"], (-4, -2))
    back = reload(flat)
    assert difference(state, back) is None
    back["base"][:] = -1
    assert all((back[name] == -1).all() for name in state)
    narrow = np.arange(6).astype(np.dtype("bfloat16"))
    both = reload(flatten([narrow, narrow[::-1]]))
    assert difference([narrow, narrow[::-1]], both) is None
    assert np.shares_memory(*both)


def test_identical_views_are_one_object() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    for state in ([base, base.detach()], [base.T, base.T]):  # a tied module's state dict has such; out of order
        flat = flatten(state)
        assert list(flat.leaves) == ["0"]
        back = reload(flat)
        assert difference(state, back) is None
        assert back[0] is back[1]


def test_leaves_that_are_stored_separately() -> None:
    floats, fields, memory = torch.arange(6.0), np.zeros(3, [("a", "f4"), ("b", "i2")]), np.arange(16, dtype=np.uint8)
    complex_, array = floats * 1j, np.arange(6.0)
    for label, state in {
        "empty": [torch.empty(0), torch.empty(0)],
        "partial": [floats[:4], floats[2:]],
        "other dtype": [floats, floats.view(torch.int32)],
        "conjugated": [complex_, complex_.conj()],
        "numpy and torch": [array, torch.from_numpy(array)],
        "scalars": [np.float32(1), np.float32(1)],
        "separate": [torch.zeros(2), torch.zeros(2)],
        "fields": [fields["a"], fields["b"]],
        "misaligned": [memory[:16].view("f4"), memory[2:10].view("f4")],
    }.items():
        flat = flatten(state)
        with case(label):
            assert not flat.aliases
            assert len(flat.leaves) == 2
            assert difference(state, reload(flat)) is None


def test_the_base_is_the_largest_leaf_and_never_an_alias() -> None:
    qkv = torch.arange(24.0).reshape(6, 4)
    flat = flatten({"k0": qkv[2], "k": qkv[2:4], "q": qkv[:2], "qkv": qkv, "again": qkv, "tail": qkv[4:, 1:]})
    assert (list(flat.leaves), {alias.of for alias in flat.aliases.values()}) == (["qkv"], {"qkv"})
    assert list(flat.aliases) == ["k0", "k", "q", "again", "tail"]
    assert flat.aliases["tail"] == Alias("qkv", 17, (2, 3), (4, 1))


def test_partly_overlapping_bases_keep_their_own_views() -> None:
    base = torch.arange(10.0)
    state = [base[:6], base[4:], base[1:3], base[7:9], base[4:6]]
    flat = flatten(state)
    assert (list(flat.leaves), (flat.aliases["2"].of, flat.aliases["3"].of)) == (["0", "1"], ("0", "1"))
    assert difference(state, reload(flat)) is None


# The offset, the shape and the strides of views that six elements do not contain.
OUTSIDE: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = [
    *((-1, (2,), (1,)), (5, (2,), (1,)), (0, (7,), (1,)), (0, (2,), (6,)), (1, (3,), (-1,))),
    *((0, (2, 2), (1,)), (0, (-1,), (1,)), (0, (0,), (1,)), (0, (2**62, 2), (0, 0)), (0, (2,), (2**63,))),
    *((2**70, (), ()), (6, (), ()), (True, (2,), (1,)), (0, (2.0,), (1,)), (0, (1,) * 65, (0,) * 65)),
]


def test_impossible_views_are_refused() -> None:
    for view, base in product(OUTSIDE, (torch.zeros(2, 3), np.zeros((2, 3)))):
        with case(view), pytest.raises(ValueError, match=r"view|empty"):
            make_view(base, Alias("b", *view))
    backwards = Alias("b", 2, (3,), (-1,))
    assert make_view(np.arange(6.0), backwards).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="negative"):
        make_view(torch.arange(6.0), backwards)
    for base in (torch.zeros(2, 3).T, np.zeros((2, 3)).T):
        with pytest.raises(ValueError, match="in C order"):
            make_view(base, Alias("b", 0, (3,), (1,)))
