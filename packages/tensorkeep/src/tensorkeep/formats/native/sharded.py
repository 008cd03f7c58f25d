"""The root manifest of a checkpoint that many ranks write, and saves that rank 0 did not finish."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tensorkeep.errors import (
    BusyError,
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import OpenSettings, WriteSettings
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.reader import OpenFiles
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage.base import Directory, PendingCommit
from tensorkeep.storage.commit import Commit, list_temporaries, prefix
from tensorkeep.storage.direct_io import sync_directory, write_small
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.system_errors import store_errors
from tensorkeep.structs import json_decoder
from tensorkeep.version import __version__

logger = logging.getLogger(__name__)

# The file, in the folder of an unfinished save, that is needed to finish it.
# In an object store there is no such folder: an unfinished save is removed later.
PLAN_NAME = "plan.json"


class SavePlan(msgspec.Struct, frozen=True):
    """A save before its data is written: the name of its destination, and the root without fragments."""

    destination: str
    overwrite: bool
    root: manifests.Root


_PLAN_DECODER = json_decoder(checksummed_json.Content[SavePlan])


def plan_root(
    flat: Flat[Source], settings: WriteSettings, *, save: str, ranks: int, layouts: Mapping[str, str] | None = None
) -> manifests.Root:
    """Return the root of a save without its fragments; ``flat`` is the merged state of all ranks, and is not read."""
    texts = layouts or {}
    leaves = [
        manifests.ShardedTensor(name, *flat.parts[name], leaf.dtype.name, tuple(leaf.shape), texts.get(name, ""))
        for name, leaf in flat.leaves.items()
    ]
    return manifests.Root(
        format="tensorkeep",
        version=manifests.VERSION,
        writer=f"tensorkeep {__version__}",
        features=[manifests.PIECES, *manifests.features_of_skeleton(flat.skeleton)],
        compression=settings.compression,
        save=save,
        ranks=ranks,
        fragments=[],
        files=[],
        leaves=leaves,
        aliases=manifests.alias_records(flat),
        skeleton=flat.skeleton,
        metadata=settings.metadata,
        step=settings.step,
    )


def write_plan(commit: PendingCommit, root: manifests.Root) -> None:
    """Write the plan of a save durably into its staging folder; StoreError if that fails."""
    path = commit.path / PLAN_NAME
    with as_a_reader():
        check_plan(root, path)
    write_small(path, checksummed_json.seal(SavePlan(commit.destination.name, commit.overwrite, root)))
    # The name of the file as well: without the plan, a complete set of fragments cannot be finished.
    with store_errors(commit.path, "make the plan durable"):
        sync_directory(commit.path)


def check_plan(root: manifests.Root, path: Path) -> None:
    # As a reader will: a state that no load accepts must fail before all ranks write it.
    manifests.parse_root(checksummed_json.seal(root), path, with_fragments=False)


def _read_plan(directory: Directory) -> SavePlan | None:
    """Return the plan of an unfinished save; None if it does not exist, or is damaged."""
    path = directory.path / PLAN_NAME
    try:
        plan = _PLAN_DECODER.decode(checksummed_json.read_content(directory, PLAN_NAME)).body
        check_plan(plan.root, path)
    except (CorruptCheckpointError, NotACheckpointError, UnsupportedError, msgspec.DecodeError, RecursionError):
        return None
    return plan


def write_root(directory: Path, plan: manifests.Root, reports: Sequence[manifests.FragmentReport]) -> int:
    """Write the manifest of a save that has durable fragments, and remove all other files; return its bytes."""
    path = directory / manifests.FILE_NAME
    content = root_content(path, plan, reports)
    # Written before the others are removed: if rank 0 dies in between, the plan is still there to finish the save.
    write_small(path, content)
    # The plan goes, and links to an earlier save that no rank used.
    listed = {path.name, *(r.record.name for r in reports), *(name for r in reports for name in r.files)}
    with store_errors(directory, "remove what does not belong to the checkpoint"):
        for other in directory.iterdir():
            if other.name not in listed:
                other.unlink()
    return len(content)


def root_content(path: Path, plan: manifests.Root, reports: Sequence[manifests.FragmentReport]) -> bytes:
    """Return the manifest of a save with durable fragments; CorruptCheckpointError unless they make up the state."""
    # The reports are believed: on a network file system, this host may not see the files of others yet.
    ordered = sorted(reports, key=lambda report: report.rank)
    if [report.rank for report in ordered] != list(range(plan.ranks)):
        found = [report.rank for report in ordered]
        raise CorruptCheckpointError(f"the fragments are those of ranks {found}, not of {plan.ranks} ranks", path=path)
    _check_boxes(plan, ordered, path)
    content = checksummed_json.seal(msgspec.structs.replace(plan, fragments=[report.record for report in ordered]))
    # No save may succeed that no load accepts.
    manifests.parse(content, path)
    return content


def _check_boxes(plan: manifests.Root, reports: Sequence[manifests.FragmentReport], path: Path) -> None:
    tensors = {leaf.name: leaf for leaf in plan.leaves}
    boxes: dict[str, list[tuple[manifests.Shape, manifests.Shape, int]]] = {name: [] for name in tensors}
    for report in reports:
        for number, offsets, sizes in report.boxes:
            name = report.leaves[number]
            if name not in tensors:
                raise CorruptCheckpointError(
                    f"rank {report.rank} saved it, but the plan lacks it", path=path, name=name
                )
            manifests.check_box(tensors[name], offsets, sizes, path)
            boxes[name].append((offsets, sizes, report.rank))
    for name, found in boxes.items():
        manifests.check_tiling(tensors[name], found, path)


def finish_saves(folder: Path) -> list[Path]:
    """Finish or clear away every abandoned save of many ranks; return the checkpoints that it made visible."""
    with store_errors(folder, "look into the folder"):
        if not folder.is_dir():
            return []
    found = [finish_or_clear(temporary) for temporary in list_temporaries(folder)]
    return [path for path in found if path is not None]


def finish_or_clear(temporary: Path) -> Path | None:
    """Finish an abandoned save if all ranks had written, or remove its folder; skip folders of live writers."""
    with store_errors(temporary, "look at the folder"):
        # Never through a link or in a folder of another user: what is in it would decide what is removed.
        if temporary.is_symlink() or not temporary.is_dir() or temporary.lstat().st_uid != os.geteuid():
            return None
    with LocalDirectory(temporary) as directory:
        plan = _read_plan(directory)
    # A folder without a plan is left alone: one process wrote it.
    if plan is None:
        return None
    destination = temporary.parent / plan.destination
    # The plan is only a file: it must not name a destination elsewhere.
    if plan.destination != destination.name or not temporary.name.startswith(prefix(destination)):
        return None
    try:
        # Adopting takes the lock of the folder, and removes the folder unless it is published.
        with Commit(
            destination, directory=True, overwrite=plan.overwrite, replaceable=is_replaceable, adopt=temporary
        ) as commit:
            _complete(commit.path, plan.root)
            commit.publish()
    except BusyError:
        return None  # its rank 0 is alive and holds the lock
    except DestinationExistsError as error:
        logger.info("the save in %s cannot be finished: %s", temporary, error)
        return None
    except TensorkeepError as error:
        logger.info("the save in %s was not complete, and is removed: %s", temporary, error)
        return None
    logger.info("finished the save of %s, whose coordinator had died", destination)
    return destination


def _complete(temporary: Path, root: manifests.Root) -> None:
    """Write the root from the fragments that are there, and check that a reader accepts the checkpoint."""
    reports: list[manifests.FragmentReport] = []
    with LocalDirectory(temporary) as directory:
        for rank in range(root.ranks):
            name = manifests.fragment_name(rank)
            content = manifests.read_fragment_content(directory, name)
            fragment = manifests.parse_fragment(content, temporary / name, root.save, root.ranks, rank)
            # `root_content` looks up the names of boxes; the index comes from the file.
            if any(box.leaf >= len(fragment.leaves) for box in fragment.boxes):
                raise CorruptCheckpointError("has a box of a tensor that is not listed", path=temporary / name)
            record = manifests.FragmentRecord(name, len(content), checksummed_json.digest(content, wide=True))
            reports.append(manifests.FragmentReport.of_fragment(fragment, record))
    # Rank 0 may have died between writing the manifest and the rename.
    (temporary / manifests.FILE_NAME).unlink(missing_ok=True)
    write_root(temporary, root, reports)
    OpenFiles(temporary, OpenSettings()).close()
