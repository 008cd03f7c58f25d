"""``tensorkeep convert``: write a checkpoint in another format or with another compression."""

from typing import Annotated, Any

from tensorkeep.checkpoint.inspect.convert import convert as write_converted
from tensorkeep.checkpoint.save.job import SaveReport
from tensorkeep.cli.addresses import checkpoint_at
from tensorkeep.cli.options import SIZE, Globs, Switch, Threads
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import print_lines, ratio
from tensorkeep.units import counted, format_bytes, format_rate, format_seconds


def convert(
    source: str,
    destination: str,
    /,
    *,
    to: str,
    compression: str | None = None,
    select: Globs = None,
    overwrite: Annotated[bool, Switch] = False,
    drop_metadata: Annotated[bool, Switch] = False,
    format: str | None = None,
    shard_bytes: Annotated[int | None, SIZE] = None,
    threads: Threads = None,
    memory_budget: Annotated[int | None, SIZE] = None,
    force: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Write a checkpoint in another format or with another compression.

    Parameters
    ----------
    source
        The checkpoint to read, or a step of a run (RUN, RUN@1200, RUN@best); it is never changed.
    destination
        The path of the new checkpoint; it becomes visible when it is complete.
    to
        The format to write: native, torch, safetensors, dcp, tensorstore, t5x, or a plug-in's.
    compression
        none (the default); lossless, about a third smaller for bf16; auto, which measures both and takes the faster;
        or the name of a codec.
    select
        Convert only tensors whose names match this glob; may be repeated.
    overwrite
        Replace a checkpoint of the same format at the destination.
    drop_metadata
        Leave out the user metadata, which some formats cannot store.
    format
        The format of the source; detected by default.
    shard_bytes
        Start a new file after this many bytes, such as 4GB.
    memory_budget
        The limit on the memory of all buffers; 256MiB by default.
    force
        Write compressed tensors into a safetensors file, although other tools would read them as bytes.
    """
    source = checkpoint_at(source, output)
    options: dict[str, Any] = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    if force:
        options["force"] = True
    with output.meter("converting") as progress:
        report = write_converted(
            source,
            destination,
            to=to,
            compression=compression,
            select=select,
            overwrite=overwrite,
            drop_metadata=drop_metadata,
            format=format,
            progress=progress,
            threads=threads,
            memory_budget=memory_budget,
            settings=output.config,
            **options,
        )
    output.show(report.as_dict(), lambda: _print_report(source, report))


def _print_report(source: str, report: SaveReport) -> None:
    coded = "" if report.compression == "none" else f", {report.compression}"
    print_lines(
        f"converted {source} to {report.path} ({report.format}{coded}): {counted(report.tensors, 'tensor')}, "
        f"{format_bytes(report.state_bytes)} raw, {format_bytes(report.stored_bytes)} stored "
        f"({ratio(report.state_bytes, report.stored_bytes)}), {format_seconds(report.seconds)} "
        f"at {format_rate(report.state_bytes, report.seconds)}"
    )
