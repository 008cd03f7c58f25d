"""`tensorkeep.convert`: write a checkpoint again, in another format, block by block."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.background import SaveMemory, SaveReport, run_now
from tensorkeep.checkpoint.match import refuse_placeholders, select_tensors
from tensorkeep.checkpoint.options import MemorySize, ProgressOption, SettingsSource, drawn
from tensorkeep.checkpoint.ranges import reading_threads
from tensorkeep.checkpoint.saving import DEFAULT_FORMAT, begin_save, check_request, default_format
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.formats.finding import open_reader
from tensorkeep.formats.torch_file.unpickle import Allow, allowed_names
from tensorkeep.paths import absolute, as_path, checked_path
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat, prune


def convert(
    src: PathLike,
    dst: PathLike,
    *,
    to: str | None = None,
    compression: str | None = None,
    select: str | Iterable[str] | None = None,
    overwrite: bool = False,
    drop_metadata: bool = False,
    verify: bool = True,
    format: str | None = None,
    allow: Allow | None = None,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    settings: SettingsSource | None = None,
    **options: Any,
) -> SaveReport:
    """Write a checkpoint again, in another format or with another compression.

    Blocks are read and written one after another, so that any size fits into the memory budget, with two exceptions:
    the whole state is in memory for ``"torch"``, one tensor for each writing thread for ``"dcp"``. The source is never
    changed.

    Parameters
    ----------
    src : path-like
        A checkpoint of any format, or a step of a run such as ``"run"`` or ``"run@1200"``; see `tensorkeep.load`.
    dst : path-like
        The path of the new checkpoint, or its URL in an object store; missing parent folders are created.
    to : str, optional
        The format to write, as the ``format`` of `tensorkeep.save`; by default the suffix of ``dst`` decides. A format
        that contradicts the suffix is refused.
    select : str or list of str, optional
        Globs on the names of tensors; only these are converted.
    drop_metadata : bool
        Leave out the user's metadata, for formats that cannot store it.
    verify, format, allow : optional
        For reading the source; see `tensorkeep.load`.
    compression, overwrite, progress, threads, memory_budget, settings, **options : optional
        For the new checkpoint; see `tensorkeep.save`. The memory budget includes the buffers of reading.

    Raises
    ------
    NotFoundError, NotACheckpointError, CorruptCheckpointError
        If ``src`` is missing, not a checkpoint, or damaged. Nothing becomes visible at ``dst``.
    UnsupportedError
        If the format ``to`` cannot store this state, its dtypes or its metadata; or the source has a `Placeholder`,
        which ``select="*"`` leaves out.
    UsageError
        If an argument is wrong, a pattern matches nothing, or ``dst`` is inside of ``src``.
    DestinationExistsError, BusyError, StoreError
        As `tensorkeep.save` for ``dst``.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = tensorkeep.save({"w": torch.ones(3)}, f"{folder.name}/a")
    >>> tensorkeep.convert(f"{folder.name}/a", f"{folder.name}/b.safetensors").format
    'safetensors'
    >>> folder.cleanup()
    """
    src, dst = checkpoint_path(src), checked_path(dst, stores=True)
    # Links are resolved: the destination may lie inside the source under another name.
    source, destination = (absolute(as_path(path), follow_links=True) for path in (src, dst))
    if source in destination.parents:
        text = "the destination is inside the source, which is never changed"
        raise UsageError(text, path=dst, remedy="choose a path outside of the source")
    to = format_for(dst, to)
    request = check_request(dst, compression, to, overwrite, None, None, threads, memory_budget, settings, options)
    with (
        drawn(progress, "converting") as callback,
        closing(SaveMemory(request.memory_budget)) as memory,
        open_reader(
            src, OpenSettings(verify=verify, pool=memory.single_pool(), allow=allowed_names(allow)), format
        ) as reader,
    ):
        write = replace(
            request.write,
            progress=callback,
            metadata={} if drop_metadata else reader.metadata,
            threads=reading_threads(request.write.threads, memory.single_pool(), reader),
            step=reader.step,
        )
        selected = _selected(reader, select)
        return run_now(partial(begin_save, selected, replace(request, write=write), memory), alone=True).result()


def format_for(dst: PathLike, to: str | None = None) -> str:
    """``to``, or else the format by the suffix. Raises UsageError if the suffix means another format."""
    by_suffix = default_format(dst)
    # Readers would take one format for the other.
    if to is not None and by_suffix not in (to, DEFAULT_FORMAT):
        suffix = Path(dst).suffix
        remedy = f"leave the suffix out, or write {by_suffix} (to={by_suffix!r}, --to {by_suffix})"
        raise UsageError(f"the suffix {suffix} belongs to the format {by_suffix}, not to {to}", path=dst, remedy=remedy)
    return to or by_suffix


def _selected(reader: Reader, select: str | Iterable[str] | None) -> Flat[Source]:
    flat = reader.flat
    if select is None:
        refuse_placeholders(reader, flat.skeleton)
        return flat
    # A view needs the stored tensor, which is not written unless it is selected.
    chosen = set(select_tensors(reader, reader.entries, select))
    orphans = [n for n in chosen if n in flat.aliases and flat.aliases[n].of not in chosen]
    if orphans:
        base = flat.aliases[orphans[0]].of
        text = f"{orphans[0]!r} is a view of {base!r}, which is not selected"
        raise UsageError(text, path=reader.path, remedy=f"select {base!r} as well")
    return Flat(
        skeleton=prune(flat.skeleton, chosen),
        leaves={name: leaf for name, leaf in flat.leaves.items() if name in chosen},
        aliases={name: alias for name, alias in flat.aliases.items() if name in chosen},
        parts={name: part for name, part in flat.parts.items() if name in chosen},
    )
