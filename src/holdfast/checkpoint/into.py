"""Whether a state that is to be filled in place fits a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.errors import StateMismatchError
from holdfast.formats.base import Reader
from holdfast.state.aliases import find_aliases, whole
from holdfast.state.leaf import Leaf
from holdfast.state.memory import sharing_conflict
from holdfast.state.tree import GivenLeaf, LeafSpec


class Target(NamedTuple):
    """A leaf of the given state.

    Attributes
    ----------
    leaf : Leaf
        Its memory.
    value : torch.Tensor or numpy.ndarray
        The caller's own object.
    fills : bool
        Whether it is to be filled itself; otherwise another one is that holds all of its memory.
    """

    leaf: Leaf
    value: Any
    fills: bool


def match(
    given: Mapping[str, GivenLeaf], reader: Reader, specs: Mapping[str, LeafSpec], chosen: list[str], *, partial: bool
) -> dict[str, Target]:
    """Return where each of the chosen tensors goes.

    Parameters
    ----------
    given : mapping of str to GivenLeaf
        All leaves of the state.
    specs : mapping of str to LeafSpec
        What the checkpoint's skeleton says of each.
    chosen : list of str
        Names of the checkpoint.
    partial : bool
        Whether the state may hold other tensors, too.

    Raises
    ------
    StateMismatchError
        If they do not fit; every difference is named, up to a handful of each kind.
    """
    wanted = set(chosen)
    bases = find_aliases(found.leaf for found in given.values())
    targets = {
        name: Target(*given[name], fills=name not in bases or bases[name].of not in wanted)
        for name in chosen
        if name in given
    }
    missing = () if partial else tuple(name for name in given if name not in wanted)
    extra = tuple(name for name in chosen if name not in given)
    different = tuple(name for name, target in targets.items() if _differs(target.leaf, reader, specs, name))
    unwritable = tuple(name for name, target in targets.items() if target.fills and not target.leaf.writable)
    if missing or extra or different or unwritable:
        raise StateMismatchError(
            "the state given to `into` does not fit the checkpoint; nothing was touched\n"
            + _listed("only in the state", missing)
            + _listed("only in the checkpoint", extra)
            + "".join(_difference(targets[name].leaf, reader, specs, name) for name in different[:5])
            + _listed("not writable in place", unwritable),
            path=reader.path,
            remedy="load without `into`, or `select` the tensors that both have",
            missing=missing,
            extra=extra,
            different=different,
        )
    _check_sharing(given, reader, specs, wanted)
    return targets


def _check_sharing(
    given: Mapping[str, GivenLeaf], reader: Reader, specs: Mapping[str, LeafSpec], wanted: set[str]
) -> None:
    """Refuse tensors that share memory, but not in the checkpoint: one value would overwrite another.

    A tensor that was not selected counts, too, since filling the other would change it; one that the checkpoint does
    not have is taken for a view that is meant to follow.
    """
    leaves = {name: found.leaf for name, found in given.items() if name in reader.entries}
    saved = {
        name: reader.flat.aliases.get(name) or whole(name, leaf.shape)
        for name, leaf in leaves.items()
        if not _differs(leaf, reader, specs, name)
    }
    conflict = sharing_conflict(leaves, saved, wanted)
    if conflict is None:
        return
    first, second = conflict
    raise StateMismatchError(
        f"{second!r} shares memory with {first!r} in the state, but not in this way in the checkpoint; "
        "nothing was touched",
        path=reader.path,
        remedy="give the state tensors of their own, or load without `into`",
        different=conflict,
    )


def _differs(leaf: Leaf, reader: Reader, specs: Mapping[str, LeafSpec], name: str) -> bool:
    entry = reader.entries[name]
    return (_library(leaf.kind), leaf.dtype, leaf.shape) != (_library(specs[name].kind), entry.dtype, entry.shape)


def _library(kind: str) -> str:
    return "tensor" if kind in ("tensor", "parameter") else "array"


def _difference(leaf: Leaf, reader: Reader, specs: Mapping[str, LeafSpec], name: str) -> str:
    entry = reader.entries[name]
    given = f"{leaf.dtype} {list(leaf.shape)}"
    saved = f"{entry.dtype} {list(entry.shape)}"
    one, other = _library(leaf.kind), _library(specs[name].kind)
    if one != other:
        given, saved = f"{one} {given}", f"{other} {saved}"
    return f"  {name}: {given} in the state, {saved} saved\n"


def _listed(what: str, found: tuple[str, ...]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"  {what}: {', '.join(found[:5])}{more}\n"
