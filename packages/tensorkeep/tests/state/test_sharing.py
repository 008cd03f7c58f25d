"""Loading into tensors that share memory, from checkpoints whose tensors share storage."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorkeep
from state.reloading import leaf_of
from tensorkeep.errors import StateMismatchError
from tensorkeep.state.aliases import extent_of, full_view, share_elements, sharing_conflict
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import leaf_bytes

SHAPES = {"a": (3, 2), "b": (3, 2), "c": (2, 3), "d": (6,), "e": (2,), "f": (2,)}
LENGTH = 12


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Draw the buffer (of two), the offset and the strides of a tensor."""
    dense = {1: (1,), 2: (shape[-1], 1)}[len(shape)]
    others = {1: [(2,), (0,)], 2: [(1, shape[0]), (0, 1), (4, 1), (2, 4)]}[len(shape)]
    strides = draw(st.sampled_from([dense, dense, dense, *others]))
    reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if reach >= LENGTH:
        strides, reach = dense, int(np.prod(shape)) - 1
    offset = draw(st.sampled_from([0, 0, draw(st.integers(0, LENGTH - 1 - reach))]) if reach < LENGTH else st.just(0))
    return draw(st.integers(0, 1)), min(offset, LENGTH - 1 - reach), strides


@st.composite
def patterns(draw: st.DrawFn) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    names = draw(st.permutations(list(SHAPES)))
    return {name: draw(layouts(SHAPES[name])) for name in names}


def build(pattern: Any, names: Any, fill: float | None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    values = torch.arange(float(LENGTH)) if fill is None else torch.full((LENGTH,), fill)
    buffers = [values + (100 * number if fill is None else 0) for number in (1, 2)]
    state = {
        name: buffers[buffer].as_strided(SHAPES[name], strides, offset)
        for name, (buffer, offset, strides) in pattern.items()
        if name in names
    }
    return state, buffers


@given(patterns(), st.none() | patterns(), st.sets(st.sampled_from(list(SHAPES)), min_size=2), st.data())
def test_a_load_restores_all_or_changes_nothing(saved: Any, given_: Any, names: set[str], data: st.DataObject) -> None:
    state, _ = build(saved, names, None)
    target, buffers = build(given_ or saved, names, -1.0)
    select = data.draw(st.none() | st.lists(st.sampled_from(sorted(names)), min_size=1))
    with tempfile.TemporaryDirectory() as folder:
        tensorkeep.save(state, Path(folder) / "c")
        try:
            found = tensorkeep.load(Path(folder) / "c", into=target, select=select)
        except StateMismatchError:
            assert all((buffer == -1.0).all() for buffer in buffers)
            return
        fresh = tensorkeep.load(Path(folder) / "c", select=select)
    wanted = names if select is None else set(select)
    assert found.keys() == fresh.keys() == wanted
    for name in names:
        if name in wanted:
            assert found[name] is target[name]
            assert leaf_bytes(target[name]) == leaf_bytes(state[name]) == leaf_bytes(fresh[name])
        else:
            # A tensor that was not selected changes only where it shares elements with a selected one.
            untouched = target[name] == -1.0
            assert (untouched | (target[name] == state[name])).all()
            assert untouched.all() or shares_with_wanted(target, name, wanted)


def shares_with_wanted(target: dict[str, torch.Tensor], name: str, wanted: set[str]) -> bool:
    extents = {each: extent_of(leaf_of(target[each])) for each in (name, *wanted)}
    return any(share_elements(extents[name], extents[other]) for other in wanted)


@given(patterns(), patterns())
def test_every_sharing_conflict_is_found(saved: Any, given_: Any) -> None:
    flat = flatten(build(saved, SHAPES, None)[0])
    places = {name: flat.aliases.get(name) or full_view(name, SHAPES[name]) for name in SHAPES}
    target = {name: leaf_of(tensor, name) for name, tensor in build(given_, SHAPES, 0.0)[0].items()}
    conflict = sharing_conflict(target, places, set(SHAPES))
    # The oracle: the saved element of each address.
    holds: dict[int, set[Any]] = {}
    within = False
    for name, leaf in target.items():
        own: dict[int, Any] = {}
        for index in np.ndindex(leaf.shape):
            address = leaf.array[index].data_ptr()
            alias = places[name]
            element = alias.of, alias.offset_elements + sum(i * s for i, s in zip(index, alias.strides, strict=True))
            within |= own.setdefault(address, element) != element
            holds.setdefault(address, set()).add(element)
    torn = any(len(elements) > 1 for elements in holds.values())
    assert conflict is not None or within or not torn
    if conflict is not None:
        assert share_elements(extent_of(target[conflict[0]]), extent_of(target[conflict[1]]))
