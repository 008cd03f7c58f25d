"""Whether a state that is to be filled in place fits a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tensorkeep.errors import StateMismatchError
from tensorkeep.formats.base import Reader
from tensorkeep.state.aliases import find_aliases, full_view, sharing_conflict
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import LeafSpec, StateLeaf

_MOST_NAMED = 5
_REMEDY = "load without `into`, or `select` the tensors that both have"


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
    given: Mapping[str, StateLeaf], reader: Reader, specs: Mapping[str, LeafSpec], chosen: list[str], *, partial: bool
) -> dict[str, Target]:
    """Return where each of the chosen tensors goes.

    Parameters
    ----------
    given : mapping of str to StateLeaf
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
    targets = _targets(given, chosen)
    differences = compare(given, reader, specs, chosen, partial=partial)
    if differences:
        raise differences.error(reader.path)
    conflict = sharing_conflict_of(given, reader, specs, wanted)
    if conflict is not None:
        raise _shares_memory(*conflict, reader.path)
    return targets


def _targets(given: Mapping[str, StateLeaf], chosen: list[str]) -> dict[str, Target]:
    wanted = set(chosen)
    bases = find_aliases(found.leaf for found in given.values())
    return {
        name: Target(*given[name], fills=name not in bases or bases[name].of not in wanted)
        for name in chosen
        if name in given
    }


@dataclass(slots=True)
class Differences:
    """What of a state does not fit a checkpoint.

    Attributes
    ----------
    missing, extra, unwritable : list of str
        Names that only the state has, that only the checkpoint has, and that cannot be filled in place.
    different : dict of str to str
        By name, what differs, in words.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)
    unwritable: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.different or self.unwritable)

    def error(self, path: Path, *, remedy: str = _REMEDY) -> StateMismatchError:
        """Return the error that names them, up to a handful of each kind."""
        more = len(self.different) - _MOST_NAMED
        return StateMismatchError(
            "the state given to `into` does not fit the checkpoint; nothing was touched\n"
            + _listed("only in the state", self.missing)
            + _listed("only in the checkpoint", self.extra)
            + "".join(f"  {name}: {what}\n" for name, what in list(self.different.items())[:_MOST_NAMED])
            + (f"  and {more} more that differ\n" if more > 0 else "")
            + _listed("not writable in place", self.unwritable),
            path=path,
            remedy=remedy,
            missing=tuple(self.missing),
            extra=tuple(self.extra),
            different=tuple(self.different),
        )


def compare(
    given: Mapping[str, StateLeaf], reader: Reader, specs: Mapping[str, LeafSpec], chosen: list[str], *, partial: bool
) -> Differences:
    """Return what does not fit; see `match`."""
    wanted = set(chosen)
    targets = _targets(given, chosen)
    return Differences(
        missing=[] if partial else [name for name in given if name not in wanted],
        extra=[name for name in chosen if name not in given],
        different={
            name: difference_of(target.leaf, reader, specs, name)
            for name, target in targets.items()
            if _differs(target.leaf, reader, specs, name)
        },
        unwritable=[name for name, target in targets.items() if target.fills and not target.leaf.writable],
    )


def sharing_conflict_of(
    given: Mapping[str, StateLeaf], reader: Reader, specs: Mapping[str, LeafSpec], wanted: Collection[str]
) -> tuple[str, str] | None:
    """Return two tensors that share memory, but not in the checkpoint: one value would overwrite another.

    A tensor that was not selected counts, too, since filling the other would change it; one that the checkpoint does
    not have is taken for a view that is meant to follow.
    """
    leaves = {name: found.leaf for name, found in given.items() if name in reader.entries}
    saved = {
        name: reader.flat.aliases.get(name) or full_view(name, leaf.shape)
        for name, leaf in leaves.items()
        if not _differs(leaf, reader, specs, name)
    }
    return sharing_conflict(leaves, saved, wanted)


def _shares_memory(first: str, second: str, path: Path) -> StateMismatchError:
    return StateMismatchError(
        f"{second!r} shares memory with {first!r} in the state, but not in this way in the checkpoint; "
        "nothing was touched",
        path=path,
        remedy="give the state tensors of their own, or load without `into`",
        different=(first, second),
    )


def _differs(leaf: Leaf, reader: Reader, specs: Mapping[str, LeafSpec], name: str) -> bool:
    entry = reader.entries[name]
    return (_library(leaf.kind), leaf.dtype, leaf.shape) != (_library(specs[name].kind), entry.dtype, entry.shape)


def _library(kind: str) -> str:
    return "tensor" if kind in ("tensor", "parameter") else "array"


def difference_of(leaf: Leaf, reader: Reader, specs: Mapping[str, LeafSpec], name: str) -> str:
    """Return in words how a tensor of the state differs from that of the checkpoint."""
    entry = reader.entries[name]
    given = f"{leaf.dtype} {list(leaf.shape)}"
    saved = f"{entry.dtype} {list(entry.shape)}"
    one, other = _library(leaf.kind), _library(specs[name].kind)
    if one != other:
        given, saved = f"{one} {given}", f"{other} {saved}"
    return f"{given} in the state, {saved} saved"


def _listed(what: str, found: list[str]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"  {what}: {', '.join(found[:_MOST_NAMED])}{more}\n"
