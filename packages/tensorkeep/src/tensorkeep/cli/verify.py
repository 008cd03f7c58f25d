"""``tensorkeep verify``: check every checksum of checkpoints."""

import os
import time
from typing import Annotated

from cyclopts import Parameter

from tensorkeep.checkpoint.verify import VerifyReport
from tensorkeep.checkpoint.verify import verify as check
from tensorkeep.cli.checkpoints import READ, BatchResults, InputFormat, ReadOptions, checkpoint_at
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import print_lines, print_verdict
from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.formats.base import Problem
from tensorkeep.runs.address import steps_of_run
from tensorkeep.units import counted, format_bytes, format_speed


def verify(
    *paths: Annotated[str, Parameter(required=True)],
    format: InputFormat = None,
    options: ReadOptions = READ,
    output: Output = DEFAULT,
) -> int:
    """Read checkpoints completely and check every checksum.

    Parameters
    ----------
    paths
        The checkpoints; a run stands for all its steps. An error does not stop the others; the exit code is the most
        severe one, in the order 4 (corrupt), 3 (I/O), 5 (not a checkpoint), 7 (unsupported).
    """
    chosen = [os.fspath(each) for path in paths for each in steps_of_run(path) or (path,)]
    # A run with one step is one checkpoint, too.
    results = BatchResults(alone=len(chosen) == 1)
    for path in chosen:
        with results.attempt(path=path):
            begin = time.perf_counter()
            with output.meter(f"verifying {path}") as progress:
                place = checkpoint_at(path, output)
                report = check(place, format=format, progress=progress, **options.arguments)
            seconds = time.perf_counter() - begin
            document = {**report.as_dict(), "seconds": seconds}
            results.add(document, 0 if report.ok else CorruptCheckpointError.exit_code)
            if not output.json:
                # Also with --quiet, which leaves damage on stdout.
                _print_report(report, seconds, quiet=output.quiet)
    output.show(results.as_dict(), lambda: None)
    return results.code


def _print_report(report: VerifyReport, seconds: float, *, quiet: bool) -> None:
    if not report.ok:
        print_verdict("corrupt", f": {report.path}: {counted(len(report.problems), 'problem')}", good=False)
        print_lines(*(f"  {_describe(problem)}" for problem in report.problems))
    elif not quiet:
        checked = report.checked or f"structure only: {report.format} stores no checksums, so values cannot be checked"
        amount = f"{counted(report.tensors, 'tensor')}, {format_bytes(report.nbytes)}"
        # Raw bytes, so that compressed checkpoints compare.
        speed = format_speed(report.nbytes, seconds)
        values = counted(len(report.placeholders), "value")
        unread = f"; {values} cannot be read (see info)" if report.placeholders else ""
        print_verdict("ok", f": {report.path}: {amount}, {checked}, {speed}{unread}", good=True)


def _describe(problem: Problem) -> str:
    tensor = None if problem.name is None else f"tensor {problem.name!r}"
    block = None if problem.block is None else f"block {problem.block}"
    return ": ".join(part for part in (problem.file, tensor, block, problem.message) if part)
