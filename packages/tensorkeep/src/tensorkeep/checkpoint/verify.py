"""`tensorkeep.verify`: read a checkpoint to the end and check everything that its format allows."""

import os
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.options import AllowOption, MemorySize, ProgressOption, drawn, open_settings, thread_count
from tensorkeep.checkpoint.ranges import read_all
from tensorkeep.errors import BLOCK_CHANGED, CorruptCheckpointError, NotACheckpointError, PathLike
from tensorkeep.formats.base import FORMATS, OpenSettings, Problem, Reader
from tensorkeep.formats.finding import find_format, open_as
from tensorkeep.paths import as_path
from tensorkeep.runs.address import checkpoint_path, steps_of_run
from tensorkeep.state.tree import placeholders
from tensorkeep.storage import exists
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.storage.parallel import Progress


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `tensorkeep.verify`; ``bool(report)`` is its ``ok``.

    Attributes
    ----------
    ok : bool
        Whether there are no `problems`.
    checked : str or None
        What was checked ("xxh3-64 of every block"); None if the format stores no checksums, so that only the structure
        was.
    tensors, nbytes : int
        The number of tensors, and their raw bytes that were read.
    placeholders : list of str
        Values that cannot be read (see `Placeholder`); only their checksums were checked.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> saved = tensorkeep.save({"w": torch.zeros(1000)}, f"{folder.name}/c")
    >>> report = tensorkeep.verify(saved.path)
    >>> bool(report), report.checked, report.nbytes, report.problems
    (True, 'xxh3-64 of every block', 4000, [])
    >>> folder.cleanup()
    """

    path: str
    format: str
    ok: bool
    checked: str | None
    tensors: int
    nbytes: int
    problems: list[Problem]
    placeholders: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.ok

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        return asdict(self)


def verify(
    path: PathLike,
    *,
    format: str | None = None,
    allow: AllowOption = None,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
) -> VerifyReport:
    """Read a checkpoint to the end and check everything that its format allows; report every problem, not only the
    first.

    Parameters
    ----------
    path : path-like
        A checkpoint, a step of a run such as ``"run@1200"``, or a run: then all steps are verified.
    format, allow, progress, threads, memory_budget : optional
        See `tensorkeep.load`. The progress of a run is counted step by step.

    Raises
    ------
    NotFoundError, NotACheckpointError
        If nothing is at the path, or not a checkpoint. Damage is reported, not raised.
    UnsupportedError, UsageError, StoreError
        As `tensorkeep.load`.

    Examples
    --------
    >>> import pathlib, tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = tensorkeep.save({"w": torch.zeros(1000)}, f"{folder.name}/c")
    >>> tensorkeep.verify(report.path).ok
    True
    >>> file = pathlib.Path(report.path, "model.safetensors")
    >>> _ = file.write_bytes(file.read_bytes()[:-1] + b"1")
    >>> [(problem.name, problem.block) for problem in tensorkeep.verify(report.path).problems]
    [('w', 0)]
    >>> folder.cleanup()
    """
    count = thread_count(threads, as_path(path))
    steps = steps_of_run(path)
    settings = open_settings(memory_budget, allow=allow)
    with settings.pool, drawn(progress, "verifying") as callback:
        if steps:
            return _verify_run(path, steps, settings, count, callback)
        return _verify_one(as_path(checkpoint_path(path)), format, settings, count, callback)


def _verify_one(
    path: Path, format: str | None, settings: OpenSettings, threads: int, progress: Progress | None
) -> VerifyReport:
    chosen = FORMATS.get(format) if format else find_format(path)
    with ExitStack() as stack:
        try:
            reader = stack.enter_context(open_as(chosen, path, settings))
        # Damage that prevents opening is a finding of `verify`, not an error.
        except CorruptCheckpointError as error:
            return VerifyReport(os.fspath(path), chosen.name, False, None, 0, 0, [_problem(error)])
        return verify_open(reader, settings.pool, threads=threads, progress=progress)


def _verify_run(
    run: PathLike, steps: list[Path], settings: OpenSettings, threads: int, progress: Progress | None
) -> VerifyReport:
    """Verify all steps of a run; the file of a problem is relative to the folder of the steps."""
    problems: list[Problem] = []
    checked: str | None = None
    tensors = nbytes = 0
    for step in steps:
        try:
            report = _verify_one(step, "native", settings, threads, progress)
        except NotACheckpointError as error:
            # Unless its writer has deleted it meanwhile.
            if exists(step):
                problems.append(Problem(error.message, step.name))
            continue
        problems += [replace(each, file="/".join([step.name, *filter(None, [each.file])])) for each in report.problems]
        checked = checked or report.checked
        tensors, nbytes = tensors + report.tensors, nbytes + report.nbytes
    return VerifyReport(os.fspath(run), "native", not problems, checked, tensors, nbytes, problems)


def verify_open(
    reader: Reader, pool: BufferPool, *, threads: int | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Verify an open checkpoint that was opened with ``verify=True``."""
    lock = threading.Lock()
    found: list[Problem] = []

    def note(error: Exception) -> None:
        if not isinstance(error, CorruptCheckpointError | NotACheckpointError):
            # A disk that fails is an error, not damage.
            raise error
        with lock:
            found.append(_problem(error))

    try:
        found.extend(reader.audit())
    except CorruptCheckpointError as error:
        note(error)
    names = list(reader.flat.leaves)
    read_all(
        reader,
        dict.fromkeys(names),
        threads=thread_count(threads),
        pool=pool,
        progress=progress,
        on_error=note,
        extent=reader.bytes_to_check,
    )
    # In the order of the state: threads find problems in any order.
    order = {name: place for place, name in enumerate(names)}
    problems = sorted(
        dict.fromkeys(found), key=lambda p: (order.get(p.name or "", -1), p.block if p.block is not None else -1)
    )
    return VerifyReport(
        path=os.fspath(reader.path),
        format=reader.format,
        ok=not problems,
        checked=reader.verifiable,
        tensors=len(reader.entries),
        nbytes=sum(map(reader.bytes_to_check, names)),
        placeholders=[found.name for found in placeholders(reader.flat.skeleton)],
        problems=problems,
    )


def error_of(report: VerifyReport) -> CorruptCheckpointError:
    """Return the first problem of a checkpoint as the error that a load raises."""
    first, path = report.problems[0], as_path(report.path)
    where = path if first.file in (None, path.name) else path / first.file
    remedy = CorruptCheckpointError.remedy if first.block is None else BLOCK_CHANGED
    return CorruptCheckpointError(first.message, path=where, name=first.name, block=first.block, remedy=remedy)


def _problem(error: CorruptCheckpointError | NotACheckpointError) -> Problem:
    block = error.block if isinstance(error, CorruptCheckpointError) else None
    return Problem(error.message, error.path and as_path(error.path).name, error.name, block)
