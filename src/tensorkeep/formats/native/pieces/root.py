"""The root manifest of a checkpoint that many ranks write: planned before the data is written, completed at the end.

On a disk, the plan is in the folder of the save, so that one whose coordinator died is finished by the next. In an
object store there is no such folder: what is not finished is left, and removed later.
"""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import AliasRecord, WriteSettings
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.pieces.fragments import check_box, check_tiling
from tensorkeep.formats.native.pieces.records import FragmentReport, Root, TensorRecord
from tensorkeep.formats.native.records import PIECES, VERSION
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage.base import Directory, PendingCommit
from tensorkeep.storage.direct_io import store_errors, sync_directory, write_small
from tensorkeep.structs import json_decoder
from tensorkeep.version import __version__

PLAN_NAME = "plan.json"
"""The file, in the folder of a save that is not finished, with which it can be finished."""


class Plan(msgspec.Struct, frozen=True):
    """What is known of a save before its data is written: its destination's name, and the root without fragments."""

    destination: str
    overwrite: bool
    root: Root


_PLAN_DECODER = json_decoder(checksummed_json.Content[Plan])


def plan_root(
    flat: Flat[Source], settings: WriteSettings, *, save: str, ranks: int, layouts: Mapping[str, str] | None = None
) -> Root:
    """Return what the root of a save will say, without its fragments.

    ``flat`` is the merged state of all ranks: its leaves have the shapes of the full tensors, and are not read.
    ``save`` is a random name of this save. ``layouts`` says in words how tensors are divided among the ranks.
    """
    texts = layouts or {}
    leaves = [
        TensorRecord(name, *flat.parts[name], leaf.dtype.name, tuple(leaf.shape), texts.get(name, ""))
        for name, leaf in flat.leaves.items()
    ]
    return Root(
        format="tensorkeep",
        version=VERSION,
        writer=f"tensorkeep {__version__}",
        features=[PIECES],
        compression=settings.compression,
        save=save,
        ranks=ranks,
        fragments=[],
        files=[],
        leaves=leaves,
        aliases={name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()},
        skeleton=flat.skeleton,
        metadata=settings.metadata,
        step=settings.step,
    )


def write_plan(commit: PendingCommit, root: Root) -> None:
    """Write the plan of a save durably into its staging folder, before any rank writes data.

    Raises StoreError if the operating system refuses.
    """
    path = commit.path / PLAN_NAME
    with as_a_reader():
        check_plan(root, path)
    write_small(path, checksummed_json.seal(Plan(commit.destination.name, commit.overwrite, root)))
    with store_errors(commit.path, "make the plan durable"):
        sync_directory(commit.path)


def check_plan(root: Root, path: Path) -> None:
    """Check a root without fragments as a reader will; raises as `manifests.parse_root`."""
    manifests.parse_root(checksummed_json.seal(root), path, with_fragments=False)


def read_plan(directory: Directory) -> Plan | None:
    """Return the plan of a save that was not finished; None if it does not exist, or is damaged."""
    path = directory.path / PLAN_NAME
    try:
        plan = _PLAN_DECODER.decode(checksummed_json.read_content(directory, PLAN_NAME)).body
        check_plan(plan.root, path)
    except (CorruptCheckpointError, NotACheckpointError, UnsupportedError, msgspec.DecodeError, RecursionError):
        return None
    return plan


def write_root(directory: Path, plan: Root, fragments: Sequence[FragmentReport]) -> int:
    """Write the manifest of a save whose fragments are durable, and remove all other files; return its bytes.

    Raises the errors of `root_content`; StoreError if the operating system refuses.
    """
    path = directory / manifests.FILE_NAME
    content = root_content(path, plan, fragments)
    write_small(path, content)
    remove_strays(directory, {path.name, *(r.record.name for r in fragments), *(n for r in fragments for n in r.files)})
    return len(content)


def root_content(path: Path, plan: Root, fragments: Sequence[FragmentReport]) -> bytes:
    """Return the manifest of a save whose fragments are durable.

    The reports are believed: on a network file system, this host may not see the files of others yet. They must be of
    all ranks, and their boxes must tile every tensor.

    Raises CorruptCheckpointError if they do not.
    """
    ordered = sorted(fragments, key=lambda report: report.rank)
    if [report.rank for report in ordered] != list(range(plan.ranks)):
        found = [report.rank for report in ordered]
        raise CorruptCheckpointError(f"the fragments are those of ranks {found}, not of {plan.ranks} ranks", path=path)
    _check_reports(plan, ordered, path)
    content = checksummed_json.seal(msgspec.structs.replace(plan, fragments=[report.record for report in ordered]))
    manifests.parse(content, path)
    return content


def _check_reports(plan: Root, reports: Sequence[FragmentReport], path: Path) -> None:
    """Check that the boxes of all ranks tile every tensor."""
    tensors = {leaf.name: leaf for leaf in plan.leaves}
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {name: [] for name in tensors}
    for report in reports:
        for number, offsets, sizes in report.boxes:
            name = report.leaves[number]
            if name not in tensors:
                raise CorruptCheckpointError(
                    f"rank {report.rank} saved it, but the plan lacks it", path=path, name=name
                )
            check_box(tensors[name], offsets, sizes, path)
            boxes[name].append((offsets, sizes, report.rank))
    check_tiling(tensors.values(), boxes, path)


def remove_strays(directory: Path, listed: Container[str]) -> None:
    """Remove what is in a staging folder and not listed, such as the plan; raises StoreError."""
    with store_errors(directory, "remove what does not belong to the checkpoint"):
        for path in directory.iterdir():
            if path.name not in listed:
                path.unlink()
