"""Properties of every state, layout and skeleton."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state.reloading import leaf_of, reload
from tensorkeep.errors import UnsupportedError
from tensorkeep.state.leaf import allocate
from tensorkeep.state.tree import flatten, leaf_specs, prune, unflatten
from tensorkeep.testing import format_suite
from tensorkeep.testing.equality import difference, leaf_bytes

slow_data = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@slow_data
@given(format_suite.states)
def test_every_state_round_trips(state: Any) -> None:
    flat = flatten(state)
    assert difference(state, reload(flat)) is None
    specs = leaf_specs(flat.skeleton)
    assert flat.parts.keys() == specs.keys() == flat.leaves.keys() | flat.aliases.keys()
    assert len(set(flat.parts.values())) == len(flat.parts)
    for name in (*specs, *(relative for _, relative in flat.parts.values())):
        assert name not in ("", "__metadata__") and "\0" not in name


@slow_data
@given(format_suite.leaves, st.data())
def test_shared_views_share_memory_after_loading(value: Any, data: st.DataObject) -> None:
    twice = [value, value]
    shrink = data.draw(st.booleans())
    if shrink and value.ndim and value.shape[0] and not isinstance(value, np.generic):
        twice[1] = value[data.draw(st.integers(0, value.shape[0] - 1)) :]
    assert difference(twice, reload(flatten(twice))) is None


@slow_data
@given(format_suite.leaves, st.data())
def test_any_range_of_any_layout_reads_and_writes(value: Any, data: st.DataObject) -> None:
    leaf = leaf_of(value)
    expected = leaf_bytes(value)
    assert len(expected) == leaf.nbytes
    size = leaf.dtype.itemsize
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, leaf.nbytes // size)] * 2)))
    out = np.empty((last - first) * size, np.uint8)
    leaf.read(first * size, last * size, out)
    assert out.tobytes() == expected[first * size : last * size]
    host = leaf.host_bytes()
    assert host is None or host.tobytes() == expected
    if leaf.writable:
        # Reversing whole elements keeps them valid, whatever the dtype.
        changed = np.ascontiguousarray(out.reshape(-1, size)[::-1]).reshape(-1)
        leaf.write(first * size, last * size, changed)
        assert leaf_bytes(value) == expected[: first * size] + changed.tobytes() + expected[last * size :]


TAGS = """
    dict items ordered ordered_items counter _metadata tuple namedtuple object enum int float complex bytes
    bytearray range set frozenset path datetime date time timedelta slice deque size dtype device tensor parameter
    ndarray npscalar requires_grad
"""

object_keys = st.sampled_from(TAGS.split()) | st.text(max_size=3)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(object_keys, values, max_size=2),
    max_leaves=10,
)


def read_or_refused(skeleton: Any) -> str:
    """Decode hostile input; errors other than those that readers expect are raised."""
    try:
        specs = leaf_specs(skeleton)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            prune(skeleton, [])
        with pytest.raises((ValueError, UnsupportedError)):
            unflatten(skeleton, {})
        return "refused"
    prune(skeleton, list(specs)[::2])
    values = {name: allocate(spec.kind, format_suite.BY_NAME["float32"], ()) for name, spec in specs.items()}
    try:
        flatten(unflatten(skeleton, values))
    except (ValueError, UnsupportedError):
        return "refused"
    return "read"


@slow_data
@given(json_values)
def test_random_json_raises_value_errors_only(skeleton: Any) -> None:
    assert read_or_refused(skeleton) in ("read", "refused")


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON document."""
    items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    return [path, *(place for key, child in items for place in places(child, (*path, key)))]


@slow_data
@given(format_suite.states, json_values, st.data())
def test_damaged_skeletons_raise_value_errors_only(state: Any, damage: Any, data: st.DataObject) -> None:
    skeleton = {"top": copy.deepcopy(flatten(state).skeleton)}
    *path, last = data.draw(st.sampled_from(places(skeleton)[1:]))
    parent: Any = skeleton
    for key in path:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[last] = damage
    elif parent is not skeleton:
        del parent[last]
    assert read_or_refused(skeleton["top"]) in ("read", "refused")
