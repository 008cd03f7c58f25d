"""Restoring the newest step of a run that is not damaged."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorkeep.checkpoint.manager.folder import StepFolder
from tensorkeep.checkpoint.manager.steps import manifest_digest
from tensorkeep.checkpoint.ranks.group import Ranks
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, RanksDisagreeError, TensorkeepError
from tensorkeep.paths import as_path

logger = logging.getLogger(__name__)

T = TypeVar("T")


def restore_newest(
    folder: StepFolder,
    restore: Callable[[Path], T],
    damaged: dict[Path, str | None],
    ranks: Ranks | None,
    *,
    stacklevel: int,
) -> T:
    """Return what ``restore`` returns for the newest step that is not damaged; warn of later ones.

    ``damaged`` receives their paths, with the digests of their manifests.

    Raises CorruptCheckpointError if every step is damaged; NotACheckpointError if no step exists; and what ``restore``
    raises for other reasons.
    """
    first_error: TensorkeepError | None = None
    for found in folder.newest_first(stacklevel=stacklevel + 1):
        path = as_path(found.path)
        error: BaseException | None = None
        lost = ranks.caller.lost if ranks else None
        try:
            state = restore(path)
        except BaseException as caught:
            error = caught
            if ranks is not None and ranks.caller.lost is not lost:
                raise  # no rank can exchange anything now
        verdict = _verdict(error, folder.place.exists, path)
        verdicts = ranks.caller.exchange(verdict, "restoring") if ranks else [verdict]
        if error is None and {*verdicts} == {"restored"}:
            return state
        if {*verdicts} <= {"damaged", "missing", "informed"} and isinstance(error, TensorkeepError):
            if "damaged" in verdicts:
                first_error = first_error or error
                damaged[path] = manifest_digest(path)
                logger.info("%s is damaged and skipped: %s", path, error)
                warnings.warn(f"{path.name} is skipped: {error}", stacklevel=stacklevel + 1)
                continue
            if verdicts[0] == "missing":
                continue  # its writer has deleted it meanwhile
        if verdict == "missing":
            raise RanksDisagreeError(
                "this rank does not find a step that rank 0 has found",
                path=path,
                remedy="give a folder that all ranks share",
            ) from error
        raise error or RanksDisagreeError("other ranks could not restore it", path=path, remedy="see their errors")
    raise first_error or NotACheckpointError(
        "contains no steps", path=folder.root, remedy="check the folder, or start from the beginning"
    )


def _verdict(error: BaseException | None, exists: Callable[[Path], bool], path: Path) -> str:
    """Return in one word how this rank's attempt ended, from which all ranks decide alike."""
    if error is None:
        return "restored"
    if isinstance(error, CorruptCheckpointError):
        return "damaged"
    if isinstance(error, NotACheckpointError):
        return "missing"
    if isinstance(error, RanksDisagreeError):  # about the error of another rank
        return "informed" if exists(path) else "missing"
    return "failed"
