"""Shared storage is stored once and restored as shared; hostile views are refused."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.state.leaf import allocate
from tensorkeep.state.tree import Flat, flatten, leaf_specs, unflatten
from tensorkeep.testing.equality import difference


def reload(flat: Flat) -> Any:
    """Load a flattened state into new memory, as a reader does."""
    skeleton = json.loads(json.dumps(flat.skeleton))
    values = {}
    for name, leaf in flat.leaves.items():
        values[name] = allocate(leaf.kind, leaf.dtype, leaf.shape)
        data = np.empty(leaf.nbytes, np.uint8)
        leaf.read(0, leaf.nbytes, data)
        memory = values[name].reshape(-1)
        (memory.view(torch.uint8).numpy() if leaf.is_torch else memory.view(np.uint8))[:] = data
    for name, alias in flat.aliases.items():
        values[name] = make_view(values[alias.of], alias)
    assert leaf_specs(skeleton).keys() == values.keys()
    return unflatten(skeleton, values)


def test_tied_parameters_are_one_object_again() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    state = {"wte": weight, "head": weight, "frozen": torch.nn.Parameter(weight.detach(), requires_grad=False)}
    flat = flatten(state)
    assert list(flat.leaves) == ["wte"]
    assert flat.aliases["head"] == Alias("wte", 0, (3, 2), (2, 1))
    back = reload(flat)
    assert difference(state, back) is None
    assert back["wte"] is back["head"]
    assert back["frozen"] is not back["wte"]
    assert back["frozen"].data_ptr() == back["wte"].data_ptr()


def test_a_tied_module_loads_from_its_state_dict() -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)])
    model[1].weight = model[0].weight
    flat = flatten(model.state_dict())
    assert list(flat.leaves) == ["0.weight"]
    back = reload(flat)
    assert back["0.weight"] is back["1.weight"]
    assert difference(model.state_dict(), back) is None


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w[1:3],
        lambda w: w.T,
        lambda w: w[2],
        lambda w: w[::2, 1::2],
        lambda w: w[3, 1],
        lambda w: w.reshape(-1),
        lambda w: w[:1].expand(5, 6),
        lambda w: w.reshape(2, 2, 6).permute(2, 0, 1),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_views_inside_a_leaf_share_memory_after_loading(view: Any, first: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"base": base, "view": view(base)} if first else {"view": view(base), "base": base}
    flat = flatten(state)
    stored = {"base"} if view(base).numel() < 24 or view(base).stride() != (1,) else {next(iter(state))}
    assert set(flat.leaves) == stored
    back = reload(flat)
    assert difference(state, back) is None
    back["base"].fill_(7.0)
    assert bool((back["view"] == 7).all())
    assert back["view"].stride() == state["view"].stride()


def test_numpy_views_share_memory_after_loading() -> None:
    base = np.arange(12.0).reshape(3, 4)
    state = {"base": base, "reversed": base[::-1, ::-2], "row": base[1], "column": base[:, 2]}
    flat = flatten(state)
    assert list(flat.leaves) == ["base"]
    assert flat.aliases["reversed"].strides == (-4, -2)
    back = reload(flat)
    assert difference(state, back) is None
    back["base"][:] = -1
    assert all((back[name] == -1).all() for name in state)


def test_numpy_views_of_ml_dtypes() -> None:
    base = np.arange(6).astype(np.dtype("bfloat16"))
    state = [base, base[::-1]]
    back = reload(flatten(state))
    assert difference(state, back) is None
    assert np.shares_memory(back[0], back[1])


def test_identical_views_out_of_order_are_one_object() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    state = [base.T, base.T]
    flat = flatten(state)
    assert list(flat.leaves) == ["0"]
    back = reload(flat)
    assert difference(state, back) is None
    assert back[0] is back[1]


@pytest.mark.parametrize(
    "state",
    [
        [torch.empty(0), torch.empty(0)],
        (lambda base: [base[:4], base[2:]])(torch.arange(6.0)),
        (lambda base: [base, base.view(torch.int32)])(torch.arange(6.0)),
        (lambda base: [base, base.conj()])(torch.arange(6.0) * 1j),
        (lambda base: [base, torch.from_numpy(base)])(np.arange(6.0)),
        [np.float32(1), np.float32(1)],
        [torch.zeros(2), torch.zeros(2)],
        (lambda base: [base["a"], base["b"]])(np.zeros(3, [("a", "f4"), ("b", "i2")])),
        (lambda memory: [memory[:16].view("f4"), memory[2:10].view("f4")])(np.arange(16, dtype=np.uint8)),
    ],
    ids=[
        "empty",
        "partial",
        "other dtype",
        "conjugated",
        "numpy and torch",
        "scalars",
        "separate",
        "fields",
        "misaligned",
    ],
)
def test_leaves_that_are_stored_separately(state: Any) -> None:
    flat = flatten(state)
    assert not flat.aliases
    assert len(flat.leaves) == 2
    assert difference(state, reload(flat)) is None


def test_the_base_is_the_largest_leaf_and_never_an_alias() -> None:
    qkv = torch.arange(24.0).reshape(6, 4)
    flat = flatten({"k0": qkv[2], "k": qkv[2:4], "q": qkv[:2], "qkv": qkv, "again": qkv, "tail": qkv[4:, 1:]})
    assert list(flat.leaves) == ["qkv"]
    assert {alias.of for alias in flat.aliases.values()} == {"qkv"}
    assert list(flat.aliases) == ["k0", "k", "q", "again", "tail"]
    assert flat.aliases["tail"] == Alias("qkv", 17, (2, 3), (4, 1))


def test_partly_overlapping_bases_keep_their_own_views() -> None:
    base = torch.arange(10.0)
    state = [base[:6], base[4:], base[1:3], base[7:9], base[4:6]]
    flat = flatten(state)
    assert list(flat.leaves) == ["0", "1"]
    assert (flat.aliases["2"].of, flat.aliases["3"].of) == ("0", "1")
    assert difference(state, reload(flat)) is None


@pytest.mark.parametrize(
    "alias",
    [
        Alias("b", -1, (2,), (1,)),
        Alias("b", 5, (2,), (1,)),
        Alias("b", 0, (7,), (1,)),
        Alias("b", 0, (2,), (6,)),
        Alias("b", 1, (3,), (-1,)),
        Alias("b", 0, (2, 2), (1,)),
        Alias("b", 0, (-1,), (1,)),
        Alias("b", 0, (0,), (1,)),
        Alias("b", 0, (2**62, 2), (0, 0)),
        Alias("b", 0, (2,), (2**63,)),
        Alias("b", 2**70, (), ()),
        Alias("b", 6, (), ()),
        Alias("b", True, (2,), (1,)),
        Alias("b", 0, (2.0,), (1,)),  # type: ignore[arg-type]
        Alias("b", 0, (1,) * 65, (0,) * 65),
    ],
)
def test_views_outside_the_base_are_refused(alias: Alias) -> None:
    with pytest.raises(ValueError, match=r"view|empty"):
        make_view(torch.zeros(2, 3), alias)
    with pytest.raises(ValueError, match=r"view|empty"):
        make_view(np.zeros((2, 3)), alias)


def test_impossible_views_are_refused() -> None:
    backwards = Alias("b", 2, (3,), (-1,))
    assert make_view(np.arange(6.0), backwards).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="negative"):
        make_view(torch.arange(6.0), backwards)
    part = Alias("b", 0, (3,), (1,))
    with pytest.raises(ValueError, match="in C order"):
        make_view(torch.zeros(2, 3).T, part)
    with pytest.raises(ValueError, match="in C order"):
        make_view(np.zeros((2, 3)).T, part)
