"""Nested state -> skeleton + named leaves, and back, exactly.

The skeleton is plain JSON (objects, arrays, strings, integers, booleans, null; no floats) and part of the on-disk
format, so it must stay readable for ever. Every value is a *node*:

===========================================================  =======================================================
node                                                         value
===========================================================  =======================================================
``null``, ``true``, ``false``, a string                      itself
an integer                                                   an int below 2**53 in magnitude
``{"int": "0x20000000000000"}``                              any other int, in hexadecimal
``{"float": "0.1"}``                                         a float: the shortest decimal that reads back the same;
                                                             ``inf``, ``-inf``; a NaN as ``nan:`` and its 64 bits
``{"complex": ["0.0", "-1.5"]}``                             a complex: real and imaginary part as such floats
``{"bytes": "aGk="}``, ``{"bytearray": "aGk="}``             bytes in base64
``{"range": [0, 10, 2]}``                                    a range: start, stop, step (integers as above)
``{"set": [KEY, ...]}``, ``{"frozenset": [KEY, ...]}``       a set of plain scalars
``[NODE, ...]``                                              a list
``{"tuple": [NODE, ...]}``                                   a tuple
``{"dict": {"key": NODE, ...}}``                             a dict whose keys are all strings, in order
``{"items": [[KEY, NODE], ...]}``                            a dict of other keys, too. KEY is null, a boolean, a
                                                             string, an integer, ``{"int": ...}`` or ``{"float": ...}``
``{"ordered": {...}}``, ``{"ordered_items": [...]}``         an OrderedDict, likewise; with ``"_metadata": NODE``
                                                             beside it if it has torch's ``_metadata`` attribute
``{"counter": [[KEY, NODE], ...]}``                           a collections.Counter
``{"namedtuple": ["Point", {"x": NODE, ...}]}``              a named tuple that was not registered
``{"object": ["module:Class", {"field": NODE, ...}]}``       a registered dataclass or named tuple
``{"enum": ["module:Class", "MEMBER"]}``                     a registered enum; a combination of flags by its integer
``{"size": [2, 3]}``                                         a torch.Size
``{"dtype": "bfloat16"}``, ``{"device": "cuda:0"}``          a torch.dtype, a torch.device
``{"tensor": NAME}``                                         a leaf, by name: a torch tensor;
``{"parameter": NAME}``                                      a torch.nn.Parameter;
``{"ndarray": NAME}``, ``{"npscalar": NAME}``                a numpy array; a numpy scalar, stored as a 0-d array
===========================================================  =======================================================

A tensor that tracks gradients has ``"requires_grad": true`` beside its name, a parameter that does not ``false``.
dtype, shape and place of a leaf are not here but in the manifest's table of leaves. A dict, list or object that stands
in two places of a state comes back as two; tensors that share storage are shared again (see ``aliases.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from tensorkeep.errors import PathLike, UnsupportedError
from tensorkeep.state import names
from tensorkeep.state.aliases import Alias, find_aliases
from tensorkeep.state.leaf import Leaf, LeafKind
from tensorkeep.state.pruning import prune
from tensorkeep.state.skeleton_reader import MAX_DEPTH, SkeletonReader
from tensorkeep.state.skeleton_writer import FoundLeaf, SkeletonWriter
from tensorkeep.state.source import Source
from tensorkeep.state.strided import Array

__all__ = [
    "MAX_DEPTH",
    "Flat",
    "GivenLeaf",
    "LeafSpec",
    "flatten",
    "given_leaves",
    "given_paths",
    "leaf_specs",
    "prune",
    "unflatten",
]


S_co = TypeVar("S_co", bound=Source, covariant=True)


@dataclass(frozen=True)
class Flat(Generic[S_co]):
    """A state, flattened.

    Attributes
    ----------
    skeleton : object
        The state's structure and plain values, as JSON.
    leaves : mapping of str to Source
        The leaves to store, in traversal order.
    aliases : dict of str to Alias
        The leaves that are views of stored ones.
    parts : dict of str to (str, str)
        For each leaf, aliases included, its part and its name relative to the part.
    """

    skeleton: object
    leaves: Mapping[str, S_co]
    aliases: dict[str, Alias]
    parts: dict[str, tuple[str, str]]


class LeafSpec(NamedTuple):
    """What a skeleton says of a leaf.

    Attributes
    ----------
    kind : str
        ``"tensor"``, ``"parameter"``, ``"ndarray"`` or ``"npscalar"``.
    requires_grad : bool
        Whether it tracks gradients.
    """

    kind: LeafKind
    requires_grad: bool


class GivenLeaf(NamedTuple):
    """A leaf of a state that is to be filled, and the caller's own tensor or array, which it shares its memory with."""

    leaf: Leaf
    value: Any


def flatten(state: object) -> Flat[Leaf]:
    """Take a nested state apart; no tensor is copied.

    Raises
    ------
    UnsupportedLeafError
        For the first value that cannot be saved; it names the key and says what to do.
    """
    skeleton, found = _encode(state)
    leaves = [one.leaf for one in found]
    aliases = find_aliases(leaves)
    assigned = [leaf.name for leaf in leaves]
    parts = names.assign_parts([one.path for one in found], assigned, is_dict=isinstance(state, dict))
    stored = {leaf.name: leaf for leaf in leaves if leaf.name not in aliases}
    return Flat(skeleton, stored, aliases, parts)


def given_leaves(state: object) -> dict[str, GivenLeaf]:
    """Return every leaf of a state by its name, those that share another's storage included.

    Raises
    ------
    UnsupportedLeafError
        As `flatten`.
    """
    return {one.leaf.name: GivenLeaf(one.leaf, one.value) for one in _encode(state)[1]}


def given_paths(state: object) -> dict[str, names.Path]:
    """Return the keys that lead to each leaf of a state, by its name."""
    return {one.leaf.name: one.path for one in _encode(state)[1]}


def _encode(state: object) -> tuple[object, list[FoundLeaf]]:
    writer = SkeletonWriter()
    skeleton = writer.encode(state, ())
    assigned = names.assign_names([found.path for found in writer.found])
    for found, name in zip(writer.found, assigned, strict=True):
        found.leaf.name = name
        found.node[found.leaf.kind] = name
    return skeleton, writer.found


def unflatten(
    skeleton: object, values: Mapping[str, Array], *, as_given: bool = False, path: PathLike | None = None
) -> Any:
    """Rebuild a state.

    Parameters
    ----------
    skeleton : object
        From `flatten`, or from a file.
    values : mapping of str to torch.Tensor or numpy.ndarray
        For each leaf that the skeleton names its data, of the leaf's kind as ``leaf.allocate`` makes it. Where two
        names have the same object, the state gets the same object, too (a tied parameter is one parameter again).
        A `torch.nn.Parameter` or tensor that already tracks gradients as the leaf did is taken as it is.
    as_given : bool
        Put each value into the state as it is: a parameter stays one, a tensor tracks gradients or not as before.
    path : path-like, optional
        The checkpoint, for error messages.

    Raises
    ------
    ValueError
        If the skeleton is malformed, or names a leaf that ``values`` lacks.
    UnsupportedError
        If it holds an object of a class that is not registered in this process, or has other fields now.
    """
    try:
        return SkeletonReader(values, as_given=as_given).decode(skeleton)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, path=path, name=error.name, remedy=error.remedy) from None


def leaf_specs(skeleton: object) -> dict[str, LeafSpec]:
    """Return the leaves that a skeleton names, in order, having checked all of it.

    Raises
    ------
    ValueError
        If any node is malformed, two leaves have one name, or the nesting is deeper than ``MAX_DEPTH``.
    """
    reader = SkeletonReader(None)
    reader.decode(skeleton)
    return {name: LeafSpec(kind, grad) for name, (kind, grad) in reader.seen.items()}
