"""The state of a checkpoint from its skeleton and the values of its tensors."""

from collections.abc import Mapping
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats.base import Reader
from tensorkeep.state.tree import unflatten


def rebuild(reader: Reader, skeleton: object, values: Mapping[str, Any], *, as_given: bool) -> Any:
    """Return the state that a skeleton describes, with these values for its tensors; see `unflatten`.

    Raises CorruptCheckpointError if a value of the skeleton cannot be rebuilt.
    """
    try:
        return unflatten(skeleton, values, as_is=as_given)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, path=reader.path, remedy=error.remedy) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"its structure cannot be rebuilt ({error})", path=reader.path) from error
