"""The stored description of a state in JSON, and the rules that it must keep."""

from collections.abc import Mapping
from math import prod
from typing import Any, TypeVar

import msgspec

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.state.aliases import Alias
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Source
from tensorkeep.state.skeleton_reader import LeafSpec
from tensorkeep.state.tree import Flat, leaf_specs

_MOST = 2**63
_MOST_SAVED = 2**61
"""Bytes, were the lengths 0 of an empty tensor 1: libraries count so, and some keep a few bits for themselves."""

PartKey = tuple[str, str]
"""Part of the state, and key within the part."""

SourceT = TypeVar("SourceT", bound=Source)


class AliasRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An `Alias` as JSON: offset and strides count elements.

    ``key`` is stored in manifests only; everywhere else `Structure.parts` has it.
    """

    of: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    part: str
    key: str = ""

    @classmethod
    def of_alias(cls, alias: Alias, part: str, key: str = "") -> "AliasRecord":
        """Return the record of an alias."""
        return cls(alias.of, alias.offset_elements, alias.shape, alias.strides, part, key)

    def alias(self) -> Alias:
        """Return the alias."""
        return Alias(self.of, self.offset, self.shape, self.strides)


class Structure(msgspec.Struct, frozen=True):
    """How tensors form a nested state: skeleton, views of stored tensors, part and key of every tensor."""

    skeleton: Any
    aliases: dict[str, AliasRecord]
    parts: dict[str, PartKey]

    @classmethod
    def of_state(cls, flat: Flat[Source]) -> "Structure":
        """Return the structure of a flattened state."""
        aliases = {name: AliasRecord.of_alias(alias, flat.parts[name][0]) for name, alias in flat.aliases.items()}
        return cls(flat.skeleton, aliases, flat.parts)

    def flat(self, leaves: Mapping[str, SourceT]) -> Flat[SourceT]:
        """Return the flattened state with these stored tensors; `check_structure` is still to be called."""
        aliases = {name: record.alias() for name, record in self.aliases.items()}
        return Flat(self.skeleton, leaves, aliases, self.parts)


def check_saveable(flat: Flat[Source]) -> None:
    """Check a state with the code of the readers: what they would refuse must not be saved.

    Raises UnsupportedLeafError with the rule that is broken.
    """
    tensors = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in flat.leaves.items()}
    for name, (dtype, shape) in tensors.items():
        if _extent(shape) * dtype.itemsize >= _MOST_SAVED:
            text = f"a tensor of shape {list(shape)} cannot be saved: not every library can have it"
            raise UnsupportedLeafError(text, name=name, remedy="save it in another shape, x.flatten() for example")
    try:
        check_structure(flat.skeleton, tensors, flat.aliases, flat.parts)
    except ValueError as error:
        remedy = "rename or leave out what the message names, and report this: it should have had a better message"
        raise UnsupportedLeafError(f"a load would refuse this state: {error}", remedy=remedy) from error


def check_structure(
    skeleton: object,
    tensors: Mapping[str, tuple[DType, tuple[int, ...]]],
    aliases: Mapping[str, Alias],
    parts: Mapping[str, PartKey],
) -> dict[str, LeafSpec]:
    """Check that a state can be rebuilt from a skeleton, dtype and shape of the stored tensors, views and parts.

    Return the leaves that the skeleton names, in its order: the skeleton is decoded here, and nowhere else.

    Raises ValueError with the rule that is broken.
    """
    specs = leaf_specs(skeleton)
    known = tensors.keys() | aliases.keys()
    if specs.keys() != known:
        raise ValueError("the structure and the table of tensors do not name the same tensors")
    for name, (dtype, shape) in tensors.items():
        _check_leaf(name, specs[name], dtype, shape)
    for name, alias in aliases.items():
        if alias.of not in tensors or name in tensors:
            raise ValueError(f"{name!r} cannot be a view of {alias.of!r}")
        dtype, shape = tensors[alias.of]
        alias.validate(shape)
        _check_alias(name, specs[name], alias, specs[alias.of])
        _check_leaf(name, specs[name], dtype, alias.shape)
    places = list(parts.values())
    if parts.keys() != known:
        raise ValueError("the parts and the table of tensors do not name the same tensors")
    if len(set(places)) != len(places):
        raise ValueError("two tensors have the same part and key")
    if any(not part or not key or key == "__metadata__" for part, key in places):
        raise ValueError("a part or a key has an impossible name")
    return specs


def _check_leaf(name: str, spec: LeafSpec, dtype: DType, shape: tuple[int, ...]) -> None:
    numpy = spec.kind in ("ndarray", "npscalar")
    if not (dtype.has_numpy if numpy else dtype.has_torch):
        raise ValueError(f"{name!r} cannot be a {spec.kind} of {dtype}")
    if _extent(shape) * (dtype.itemsize if numpy else 1) >= _MOST:
        raise ValueError(f"{name!r} has the impossible shape {list(shape)}")
    if spec.kind == "npscalar" and shape:
        raise ValueError(f"{name!r} is a scalar of shape {list(shape)}")
    if spec.requires_grad and not (dtype.kind in ("float", "complex") or dtype.name.startswith("float")):
        raise ValueError(f"{name!r} cannot track gradients in {dtype}")


def _extent(shape: tuple[int, ...]) -> int:
    """Return the product of the lengths; libraries multiply those of an empty tensor, too."""
    return prod(length for length in shape if length)


def _check_alias(name: str, spec: LeafSpec, alias: Alias, base: LeafSpec) -> None:
    torch_kinds = ("tensor", "parameter")
    if (spec.kind in torch_kinds) != (base.kind in torch_kinds):
        raise ValueError(f"{name!r}, of kind {spec.kind}, cannot be a view of the {base.kind} {alias.of!r}")
    if spec.kind in torch_kinds and min(alias.strides, default=0) < 0:
        raise ValueError(f"{name!r} is a tensor of negative strides")
