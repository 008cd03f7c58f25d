"""Finishing saves whose coordinator died after every rank had written its part; clearing away the others."""

import logging
import os
from pathlib import Path

from tensorkeep.errors import BusyError, CorruptCheckpointError, DestinationExistsError, TensorkeepError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.open_files import OpenFiles
from tensorkeep.formats.native.pieces.fragments import parse_fragment, read_content
from tensorkeep.formats.native.pieces.records import FragmentRecord, FragmentReport, fragment_name
from tensorkeep.formats.native.pieces.root import Plan, read_plan, write_root
from tensorkeep.storage.base import MANIFEST_NAME
from tensorkeep.storage.commit import Commit, list_temporaries, prefix
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.storage.local import LocalDirectory

logger = logging.getLogger(__name__)


def finish_saves(folder: Path) -> list[Path]:
    """Finish or clear away every abandoned save of many ranks in a folder; return the checkpoints that it made visible.

    A save whose coordinator is alive is left alone. So are staging folders of other users. The folder may be missing.

    Raises StoreError if the folder cannot be listed.
    """
    with store_errors(folder, "look into the folder"):
        if not folder.is_dir():
            return []
    found = [finish_or_clear(temporary) for temporary in list_temporaries(folder)]
    return [path for path in found if path is not None]


def finish_or_clear(temporary: Path) -> Path | None:
    """Finish the save in an abandoned staging folder if all ranks had written, or remove the folder.

    Return the checkpoint that it made visible; None if it did not. A folder without a plan is left alone: one process
    wrote it. So is one whose writer is alive, or that belongs to another user.
    """
    with store_errors(temporary, "look at the folder"):
        if temporary.is_symlink() or not temporary.is_dir() or temporary.lstat().st_uid != os.geteuid():
            return None
    with LocalDirectory(temporary) as directory:
        plan = read_plan(directory)
    if plan is None:
        return None
    destination = temporary.parent / plan.destination
    if plan.destination != destination.name or not temporary.name.startswith(prefix(destination)):
        return None
    try:
        with Commit(
            destination, directory=True, overwrite=plan.overwrite, replaceable=is_replaceable, adopt=temporary
        ) as commit:
            _complete(commit.path, plan)
            commit.publish()
    except BusyError:
        return None
    except DestinationExistsError as error:
        logger.info("the save in %s cannot be finished: %s", temporary, error)
        return None
    except TensorkeepError as error:
        logger.info("the save in %s was not complete, and is removed: %s", temporary, error)
        return None
    logger.info("finished the save of %s, whose coordinator had died", destination)
    return destination


def _complete(temporary: Path, plan: Plan) -> None:
    """Write the root from the fragments that are there, and check that a reader accepts the checkpoint."""
    root = plan.root
    reports: list[FragmentReport] = []
    with LocalDirectory(temporary) as directory:
        for rank in range(root.ranks):
            name = fragment_name(rank)
            content = read_content(directory, name)
            fragment = parse_fragment(content, temporary / name, root.save, root.ranks, rank)
            for box in fragment.boxes:
                if box.leaf >= len(fragment.leaves):
                    raise CorruptCheckpointError("has a box of a tensor that is not listed", path=temporary / name)
            reports.append(
                FragmentReport(
                    rank,
                    FragmentRecord(name, len(content), checksummed_json.digest(content, wide=True)),
                    [file.name for file in fragment.files],
                    fragment.leaves,
                    [(box.leaf, box.offsets, box.sizes) for box in fragment.boxes],
                )
            )
    (temporary / MANIFEST_NAME).unlink(missing_ok=True)  # its writer died before the rename
    write_root(temporary, root, reports)
    OpenFiles(temporary, OpenSettings()).close()
