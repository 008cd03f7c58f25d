"""Reading a results file that nobody vouches for; ``document`` says what is in it."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.report.document import Measure, Results
from tensorkeep.report.plain import clean

FILE_NAME = "results.json"
KIND = "tensorkeep-results"
SCHEMA = 1
MAX_BYTES = 64 * 1024**2
MAX_ARMS = 2000
MAX_CELLS = 200_000
MAX_NAME = 200
MAX_DEPTH = 50

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')

_AGAIN = "measure again, or take another copy of the file"

T = TypeVar("T")


class _Head(msgspec.Struct):
    kind: str | None = None
    schema: int | None = None


def read_results(path: str | os.PathLike[str]) -> Results:
    """Return the results of a run, checked.

    Parameters
    ----------
    path : path-like
        A results file, or the folder that holds ``results.json``.

    Raises
    ------
    NotACheckpointError
        If there is nothing there.
    UsageError
        If it is some other file.
    UnsupportedError
        If a later Tensorkeep wrote it, or it is too large.
    CorruptCheckpointError
        If it breaks the rules of a results file.
    StoreError
        If the operating system refuses.
    """
    file, content = _read(Path(path))
    head = _decode(content, _Head, file)
    if head.kind != KIND:
        raise UsageError(
            "is no results file of Tensorkeep", path=file, remedy="give the results.json that `tensorkeep bench` wrote"
        )
    if head.schema is None or head.schema > SCHEMA:
        raise UnsupportedError(
            f"has schema {head.schema}, this Tensorkeep reads up to {SCHEMA}",
            path=file,
            remedy="install a later Tensorkeep",
        )
    if _depth(content) > MAX_DEPTH:
        raise CorruptCheckpointError("is no valid results file: it is nested too deeply", path=file, remedy=_AGAIN)
    results = _decode(content, Results, file)
    problem = _problem(results)
    if problem:
        raise CorruptCheckpointError(f"is no valid results file: {problem}", path=file, remedy=_AGAIN)
    return msgspec.structs.replace(results, measures=[_harmless(measure) for measure in results.measures])


def _depth(content: bytes) -> int:
    """Return how deeply JSON is nested: whoever prints it goes down as far."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(content):
        if found[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in (b"]", b"}"):
            depth -= 1
    return deepest


def _harmless(measure: Measure) -> Measure:
    label, unit = clean(measure.label or measure.name), clean(measure.unit)
    return msgspec.structs.replace(measure, label=label[:MAX_NAME], unit=unit[:MAX_NAME], about=clean(measure.about))


def _read(path: Path) -> tuple[Path, bytes]:
    file = path / FILE_NAME if path.is_dir() else path
    try:
        # A named pipe must not keep the reader waiting for ever.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise UsageError(
                    "is no regular file", path=file, remedy="give a results.json, or the folder it lies in"
                )
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            remedy = "give the folder that `tensorkeep bench` wrote, or its results.json"
            raise NotFoundError("there is no results file", path=file, remedy=remedy) from None
        raise StoreError(f"cannot read the results: {error.strerror}", path=file) from error
    if len(content) > MAX_BYTES:
        raise UnsupportedError(f"is larger than {MAX_BYTES >> 20} MiB", path=file, remedy="this is no results file")
    return file, content


def _decode(content: bytes, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptCheckpointError(f"is no valid results file: {said}", path=file, remedy=_AGAIN) from None


def _problem(results: Results) -> str | None:
    """Return what is wrong with the document as a whole, which no type can say."""
    names = [arm.name for arm in results.arms]
    known = set(names)
    measures = [measure.name for measure in results.measures]
    if len(names) > MAX_ARMS or len(results.cells) > MAX_CELLS:
        return f"it claims {len(names)} arms and {len(results.cells)} cells"
    if not names:
        return "it has no arms"
    if len(known) < len(names) or len(set(measures)) < len(measures):
        return "two arms or two measures have the same name"
    for name in [*names, *measures]:
        if not 0 < len(name) <= MAX_NAME:
            return f"a name has {len(name)} characters; 1 to {MAX_NAME} are allowed"
    if results.baseline is not None and results.baseline not in known:
        return f"its baseline {results.baseline[:MAX_NAME]!r} is no arm"
    for cell in results.cells:
        if cell.arm not in known:
            return f"a cell belongs to {cell.arm[:MAX_NAME]!r}, which is no arm"
    return None
