"""A nested state, its leaves and their dtypes."""

from tensorkeep.state.aliases import Alias, make_view
from tensorkeep.state.dtypes import BY_NAME, DType, of_numpy
from tensorkeep.state.leaf import Array, Leaf, LeafKind, Source, allocate
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.state.tree import Flat, flatten, state_leaves, unflatten

__all__ = [
    "BY_NAME",
    "DEFAULT_PART",
    "Alias",
    "Array",
    "DType",
    "Flat",
    "Leaf",
    "LeafKind",
    "ShardedLeaf",
    "Source",
    "allocate",
    "flatten",
    "make_view",
    "of_numpy",
    "state_leaves",
    "unflatten"
]  # fmt: skip
