"""The state of a checkpoint from its skeleton and the values of its tensors."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tensorkeep.checkpoint.stateful import paths_to
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError, stack_level_of_caller
from tensorkeep.formats.base import Reader
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.names import Path, display, select
from tensorkeep.state.tree import placeholders, unflatten

_MOST_NAMED = 5


def rebuild(reader: Reader, skeleton: object, values: Mapping[str, Any], *, as_given: Collection[str]) -> Any:
    """Return the state that a skeleton describes, with these values for its tensors; see `unflatten`.

    Raises CorruptCheckpointError if a value of the skeleton cannot be rebuilt.
    """
    try:
        return unflatten(skeleton, values, as_is=as_given)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, path=reader.path, remedy=error.remedy) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"its structure cannot be rebuilt ({error})", path=reader.path) from error


def refuse_placeholders(reader: Reader, skeleton: object) -> None:
    """Raise UnsupportedError if a skeleton of the checkpoint has a placeholder."""
    for found in placeholders(skeleton):
        raise reader.refusal or _unreadable(reader, found, found.name)


def select_tensors(reader: Reader, candidates: Iterable[str], patterns: str | Iterable[str]) -> list[str]:
    """Return the names that match; see `names.select`. UnsupportedError if a pattern is the name of a placeholder."""
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    refuse_placeholders_named(reader, given)
    return select(candidates, given)


def refuse_placeholders_named(reader: Reader, names: Collection[str]) -> None:
    """Raise UnsupportedError if one of some names is that of a placeholder."""
    for found in placeholders(reader.flat.skeleton):
        if found.name in names:
            raise _unreadable(reader, found, found.name)


def refuse_placeholders_of(reader: Reader, path: Path, state: Any) -> None:
    """Raise UnsupportedError if a part of the state, to which some keys lead, has a placeholder."""
    for keys, found in paths_to(state, Placeholder):
        raise _unreadable(reader, found, display((*path, *keys)))


def _unreadable(reader: Reader, found: Placeholder, name: str) -> UnsupportedError:
    return UnsupportedError(f"cannot be read: {found.what}", path=reader.path, name=name, remedy=found.remedy or None)


def warn_of_placeholders(reader: Reader, skeleton: object) -> None:
    """Warn of the placeholders in a state that is loaded."""
    found = placeholders(skeleton)
    if found:
        named = "; ".join(f"{each.name}: {each.what}" for each in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        text = f"{reader.path}: placeholders take the place of what cannot be read: {named}{more}"
        warnings.warn(f'{text} (select="*" leaves them out)', stacklevel=stack_level_of_caller())


def warn_of_attributes(reader: Reader) -> None:
    """Warn of attributes of tensors and dicts that the loaded state does not have."""
    if left_out := reader.details.get("attributes_left_out"):
        text = f"{reader.path}: attributes of tensors or containers are not loaded: {', '.join(left_out[:_MOST_NAMED])}"
        warnings.warn(text, stacklevel=stack_level_of_caller())
