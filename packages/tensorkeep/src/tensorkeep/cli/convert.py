"""``tensorkeep convert``: write a checkpoint in another format or with another compression."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from tensorkeep.checkpoint.background import SaveReport
from tensorkeep.checkpoint.convert import convert as write_converted
from tensorkeep.checkpoint.convert import format_for
from tensorkeep.cli.checkpoints import OPEN, BatchResults, Globs, OpenOptions, checkpoint_at
from tensorkeep.cli.options import SIZE, AtLeastOne, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import print_lines, ratio
from tensorkeep.errors import DestinationExistsError, TensorkeepError, UsageError
from tensorkeep.formats.base import FORMATS, format_by_suffix
from tensorkeep.formats.finding import find_format
from tensorkeep.paths import StorePath, checked_path
from tensorkeep.units import counted, format_bytes, format_speed


@Parameter(name="*")
@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion, with the names of `tensorkeep.convert`.

    Attributes
    ----------
    compression
        none (the default); lossless, about a third smaller for bf16; auto, which measures both and takes the faster;
        or the name of a codec.
    select
        Convert only tensors with a name that matches this glob; may be repeated.
    overwrite
        Replace a checkpoint of the same format at the destination.
    drop_metadata
        Leave out the user metadata, which some formats cannot store.
    format
        The format of the source; detected by default.
    shard_bytes
        Start a new file after this many bytes, such as 4GB.
    threads
        The number of threads.
    memory_budget
        The limit on the memory of all buffers; 256MiB by default.
    force
        Write compressed tensors into a safetensors file, although other tools would read them as bytes.
    """

    compression: str | None = None
    select: Globs = None
    overwrite: Annotated[bool, Switch] = False
    drop_metadata: Annotated[bool, Switch] = False
    format: str | None = None
    shard_bytes: Annotated[int | None, SIZE] = None
    threads: Annotated[int | None, AtLeastOne] = None
    memory_budget: Annotated[int | None, SIZE] = None
    force: Annotated[bool, Switch] = False

    @property
    def arguments(self) -> dict[str, Any]:
        # A format refuses an option that it does not know, so that these two are passed only if they were given.
        return {name: value for name, value in vars(self).items() if value or name not in ("shard_bytes", "force")}


DEFAULT_OPTIONS = ConvertOptions()


def convert(
    *paths: Annotated[str, Parameter(required=True)],
    to: str | None = None,
    options: ConvertOptions = DEFAULT_OPTIONS,
    source: OpenOptions = OPEN,
    output: Output = DEFAULT,
) -> int:
    """Write a checkpoint in another format or with another compression.

    Parameters
    ----------
    paths
        SOURCE... DESTINATION. A source is a checkpoint, or a step of a run (RUN, RUN@1200, RUN@best), and is never
        changed. The destination is the path of the new checkpoint; for several sources, or if it ends with a slash, it
        is the folder for new checkpoints with the names of the sources. An error does not stop the others; the exit
        code is the most severe one. A new checkpoint becomes visible when it is complete. URLs of object stores are
        paths as well.
    to
        The format to write: native, torch, safetensors, dcp, tensorstore, t5x, or a plug-in's. By default the suffix
        decides: .safetensors; .pt, .pth and .bin for torch; .zarr for tensorstore; otherwise native. A suffix
        of another format is refused.
    """
    jobs, into_folder = _plan(paths, to, output)
    if to is None:
        named = "a native checkpoint" if jobs[0].format == "native" else jobs[0].format
        output.note(f"writing {named}, by the suffix of the destination (see --to)")

    def run(job: _Job) -> SaveReport:
        with output.meter(f"converting {job.source}") as progress:
            return write_converted(
                job.source,
                job.destination,
                to=job.format,
                allow=source.allow,
                progress=progress,
                settings=output.config,
                **options.arguments,
            )

    if into_folder:
        return _run_all(jobs, run, output)
    report = run(jobs[0])
    output.show(report.as_dict(), lambda: _print_report(jobs[0].source, report))
    return 0


class _Job(NamedTuple):
    source: str
    destination: str
    format: str


def _plan(paths: Sequence[str], to: str | None, output: Output) -> tuple[list[_Job], bool]:
    """Return the conversions, and whether the destination is a folder for new checkpoints."""
    if len(paths) < 2:
        raise UsageError("no destination is given", remedy="give SOURCE... DESTINATION")
    *sources, destination = paths
    checked = checked_path(destination, stores=True)
    # A StorePath has no slash at its end, and the slash says that the destination is a folder.
    lost_slash = isinstance(checked, StorePath) and destination.endswith("/")
    destination = os.fspath(checked) + "/" * lost_slash
    format = to or format_for(destination)
    # A checkpoint of the native format is a folder as well.
    into_folder = len(sources) > 1 or (destination.endswith("/") and not _is_taken(destination))
    if not into_folder:
        return [_Job(checkpoint_at(sources[0], output), destination, format)], False
    if _is_taken(destination):
        raise DestinationExistsError(
            "is not a folder for several checkpoints", path=destination, remedy="choose another"
        )
    jobs: dict[str, _Job] = {}
    for source in sources:
        name = f"{_stem(source)}{''.join(FORMATS.get(format).suffixes[:1])}"
        # The second one would replace the first.
        if name in jobs:
            raise UsageError(
                f"{jobs[name].source} and {source} would both become {name}",
                path=destination,
                remedy="convert them one by one, under names of their own",
            )
        jobs[name] = _Job(source, os.path.join(destination, name), format)
    return list(jobs.values()), True


def _is_taken(destination: str) -> bool:
    """Return whether a path is a file or a checkpoint."""
    try:
        # A folder of files of weights is not a checkpoint: others may be written into it.
        return os.path.isfile(destination) or find_format(destination).name not in ("safetensors", "torch")
    except TensorkeepError:
        return False


def _stem(source: str) -> str:
    # The path may be `.` or `..`, which are no names. The step in run@1200 stays: it is not the suffix of a format.
    path = Path(os.path.abspath(source))
    # No format has .ckpt, because every trainer uses this suffix.
    return path.stem if path.suffix.lower() == ".ckpt" or format_by_suffix(path) is not None else path.name


def _run_all(jobs: list[_Job], run: Callable[[_Job], SaveReport], output: Output) -> int:
    results = BatchResults()
    for job in jobs:
        with results.attempt(source=job.source):
            source = checkpoint_at(job.source, output)
            report = run(job._replace(source=source))
            results.add({"source": source, "ok": True, **report.as_dict()})
            if output.shows_text:
                _print_report(source, report)
    if failed := sum(map(bool, results.codes)):
        output.note(f"{counted(failed, 'checkpoint')} of {len(jobs)} failed")
    # The text was printed after each conversion.
    output.show(results.as_dict(), lambda: None)
    return results.code


def _print_report(source: str, report: SaveReport) -> None:
    coded = "" if report.compression == "none" else f", {report.compression}"
    print_lines(
        f"converted {source} to {report.path} ({report.format}{coded}): {counted(report.tensors, 'tensor')}, "
        f"{format_bytes(report.state_bytes)} raw, {format_bytes(report.stored_bytes)} stored "
        f"({ratio(report.state_bytes, report.stored_bytes)}), {format_speed(report.state_bytes, report.seconds)}"
    )
