"""Loading a flattened state into new memory, as a reader does."""

import json
from typing import Any

import numpy as np

from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.tree import Flat, leaf_specs, unflatten


def leaf_of(value: object, name: str = "x") -> Leaf:
    leaf = Leaf.of(name, value)
    assert leaf is not None
    return leaf


def reload(flat: Flat) -> Any:
    values = {}
    for name, leaf in flat.leaves.items():
        values[name] = allocate(leaf.kind, leaf.dtype, leaf.shape)
        data = np.empty(leaf.nbytes, np.uint8)
        leaf.read(0, leaf.nbytes, data)
        leaf_of(values[name]).write(0, leaf.nbytes, data)
    for name, alias in flat.aliases.items():
        values[name] = make_view(values[alias.of], alias)
    skeleton = json.loads(json.dumps(flat.skeleton, allow_nan=False))
    assert leaf_specs(skeleton).keys() == values.keys()
    return unflatten(skeleton, values)
