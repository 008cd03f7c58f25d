"""Restoring the newest step of a run that is not damaged."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorkeep.checkpoint.manager.folder import StepFolder
from tensorkeep.checkpoint.ranks.group import Ranks
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, RanksDisagreeError, TensorkeepError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def restore_newest(
    folder: StepFolder, restore: Callable[[Path], T], damaged: set[Path], ranks: Ranks | None, *, stacklevel: int
) -> T:
    """Return what ``restore`` returns for the newest step that is not damaged; warn of later ones, and note them.

    Raises CorruptCheckpointError if every step is damaged; NotACheckpointError if no step exists; and what ``restore``
    raises for other reasons.
    """
    first_error: TensorkeepError | None = None
    for found in folder.newest_first(stacklevel=stacklevel + 1):
        path = Path(found.path)
        try:
            return restore(path)
        except (CorruptCheckpointError, RanksDisagreeError) as error:
            if not _is_damage(error, ranks):
                raise
            first_error = first_error or error
            damaged.add(path)
            logger.info("%s is damaged and skipped: %s", path, error)
            warnings.warn(f"{path.name} is skipped: {error}", stacklevel=stacklevel + 1)
        except NotACheckpointError:
            continue  # its writer has deleted it meanwhile
    raise first_error or NotACheckpointError(
        "contains no steps", path=folder.root, remedy="check the folder, or start from the beginning"
    )


def _is_damage(error: TensorkeepError, ranks: Ranks | None) -> bool:
    """Return whether the step is damaged, perhaps in a part that another rank reads."""
    own = isinstance(error, CorruptCheckpointError)
    return any(ranks.caller.exchange(own, "restoring")) if ranks else own
