"""``tensorkeep.json``: nested states, shared storage, metadata and checksums beside the files of another format."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import SourceT, Structure, check_structure
from tensorkeep.formats.decoding import as_a_reader, decoding
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import MOST_DIMENSIONS, Source
from tensorkeep.state.skeleton import LeafSpec
from tensorkeep.state.tree import Flat, has_later_nodes
from tensorkeep.storage import first_bytes, open_directory, parallel, storage_of
from tensorkeep.storage.base import Directory
from tensorkeep.storage.direct_io import write_small
from tensorkeep.structs import prepared
from tensorkeep.version import __version__

FILE_NAME = "tensorkeep.json"
VERSION = 1
# The version if the structure has nodes that the first readers do not know.
_WITH_LATER_NODES = 2


_REWRITTEN = "if another tool wrote here since, remove tensorkeep.json; otherwise take another checkpoint or copy"


class SidecarTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stored tensor: its type in the state, and its encoding in the format."""

    dtype: str
    shape: tuple[int, ...]
    # The keys that lead to the tensor, in formats with nested or other names.
    place: tuple[str, ...] = ()
    # The dtype in the files, if it differs.
    stored_dtype: str = ""
    # The bytes in the files, if the format's reader cannot compute them.
    stored_bytes: int = 0
    # The checksum of the tensor's own metadata file, if it has one.
    xxh3_64: str = ""

    @property
    def state_dtype(self) -> DType:
        # `_check_tensors` has seen to it that both names are known.
        return BY_NAME[self.dtype]

    @property
    def file_dtype(self) -> DType:
        return BY_NAME[self.stored_dtype or self.dtype]


class SidecarFile(msgspec.Struct, frozen=True, omit_defaults=True):
    bytes: int
    # Empty if the files of the format have checksums themselves.
    xxh3_64: str = ""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The content of the file: what the files beside it cannot hold."""

    # The first field: `lies_in` looks for it in the first bytes of the file.
    format: str
    structure: Structure
    # In the state's order.
    tensors: dict[str, SidecarTensor]
    # By path relative to the checkpoint; checked when it is opened.
    files: dict[str, SidecarFile]
    metadata: dict[str, Any]
    # The version of this schema.
    version: int = VERSION
    writer: str = f"tensorkeep {__version__}"

    @cached_property
    def leaf_specs(self) -> dict[str, LeafSpec]:
        """Kind and ``requires_grad`` of every tensor; ValueError if the structure breaks a rule."""
        tensors = {name: (note.state_dtype, note.shape) for name, note in self.tensors.items()}
        flat: Flat[Source] = self.structure.flat({})
        return check_structure(flat.skeleton, tensors, flat.aliases, flat.parts)

    def flat(self, leaves: Mapping[str, SourceT]) -> Flat[SourceT]:
        # In the state's order, not in the order of the files.
        return self.structure.flat({name: leaves[name] for name in self.tensors})


SidecarT = TypeVar("SidecarT", bound=Sidecar)


def describe_tensors(
    flat: Flat[Source], places: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, SidecarTensor]:
    return {
        name: SidecarTensor(source.dtype.name, tuple(source.shape), (places or {}).get(name, ()))
        for name, source in flat.leaves.items()
    }


def describe_file(path: Path, *, hashed: bool) -> SidecarFile:
    if not hashed:
        return SidecarFile(path.stat().st_size)
    content = path.read_bytes()
    return SidecarFile(len(content), checksummed_json.digest(content))


def write(directory: Path, sidecar: Sidecar) -> int:
    """Write the file durably; return its size in bytes."""
    if has_later_nodes(sidecar.structure.skeleton):
        sidecar = msgspec.structs.replace(sidecar, version=_WITH_LATER_NODES)
    path, content = directory / FILE_NAME, checksummed_json.seal(sidecar)
    # No save may succeed that no load accepts.
    with as_a_reader():
        _parse(checksummed_json.body_of(content, path), type(sidecar), path)
    write_small(path, content)
    return len(content)


def lies_in(directory: Path, format: str) -> bool:
    """Return whether a directory holds the sidecar of a format, damaged or not."""
    # The format is the first field of `Sidecar`, so it is within the first bytes.
    return b'"body":{"format":"%s"' % format.encode() in (first_bytes(directory / FILE_NAME, 256) or b"")


def read(directory: Directory, format: str, kind: type[SidecarT]) -> SidecarT:
    """Return a directory's sidecar, checked in itself and against the files that it lists."""
    path = directory.path / FILE_NAME
    body = checksummed_json.read(directory, FILE_NAME, follow_links=True)
    if body.get("format") != format:
        raise CorruptCheckpointError(f"lies beside a checkpoint of the format {body.get('format')!r}", path=path)
    sidecar = _parse(body, kind, path)
    # In a store, every file is a request, so they are checked at the same time.
    checks = [partial(_check_file, directory, name, note) for name, note in sidecar.files.items()]
    parallel.run(checks, storage_of(directory.path).small_reads_at_once)
    return sidecar


def _parse(body: dict[str, Any], kind: type[SidecarT], path: Path) -> SidecarT:
    """Return a sidecar that breaks no rule; its files are not checked yet. Raises the errors of `read`."""
    # Before the fields: a later version may have changed any field.
    if body.get("version") not in (VERSION, _WITH_LATER_NODES):
        latest = f"this release reads versions up to {_WITH_LATER_NODES}"
        raise UnsupportedError(
            f"was written in version {body.get('version')} of its schema, {latest}",
            path=path,
            remedy="install a later Tensorkeep",
        )
    with decoding(path):
        sidecar = msgspec.convert(body, prepared(kind))
        _check_tensors(sidecar)
        _ = sidecar.leaf_specs
    return sidecar


def _check_tensors(sidecar: Sidecar) -> None:
    for name, note in sidecar.tensors.items():
        for dtype in (note.dtype, note.stored_dtype or note.dtype):
            if dtype not in BY_NAME:
                raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
        if len(note.shape) > MOST_DIMENSIONS or any(length < 0 for length in note.shape) or note.stored_bytes < 0:
            raise ValueError(f"{name!r} has an impossible shape or size")


def _check_file(directory: Directory, name: str, note: SidecarFile) -> None:
    path = directory.path / name
    folder, _, last = name.rpartition("/")
    # The name comes from the file: it must not lead out of the checkpoint.
    if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
        raise CorruptCheckpointError(f"lists the file {name!r}, which is not inside the directory", path=directory.path)
    try:
        with ExitStack() as stack:
            # By the open descriptor: the directory's name may stand for another one by now.
            inner = stack.enter_context(open_directory(directory.stable_path / folder)) if folder else directory
            file = stack.enter_context(inner.open(last))
            if file.size != note.bytes:
                message = f"has {file.size:,} bytes, not {note.bytes:,}"
                raise CorruptCheckpointError(message, path=path, remedy=_REWRITTEN)
            if note.xxh3_64 and checksummed_json.digest_of(file, file.size) != note.xxh3_64:
                message = "its checksum is wrong: the file has changed"
                raise CorruptCheckpointError(message, path=path, remedy=_REWRITTEN)
    except NotACheckpointError as error:
        raise CorruptCheckpointError("the file is missing", path=path, remedy="take another copy") from error
    except TensorkeepError as error:
        raise type(error)(error.message, path=path, remedy=error.remedy) from error
