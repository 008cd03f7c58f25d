"""`tensorkeep.load`: a state, or some of its tensors, into new memory or into tensors that exist."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, check_device, thread_count
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.checkpoint.load.targets import LoadPlan, match_targets
from tensorkeep.checkpoint.manager.address import checkpoint_path
from tensorkeep.errors import CorruptCheckpointError, PathLike, UnsupportedError, UsageError
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.io.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.io.parallel import Progress
from tensorkeep.state import names
from tensorkeep.state.strided import Device
from tensorkeep.state.tree import prune, state_leaves, unflatten


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments that all ways to load a state have; see `load`."""

    into: Any = None
    select: str | Iterable[str] | None = None
    device: Device = None
    progress: Progress | None = None
    threads: int | None = None


def load(
    path: PathLike,
    *,
    into: Any = None,
    select: str | Iterable[str] | None = None,
    device: Device = None,
    verify: bool = True,
    page_cache: bool = False,
    format: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
) -> Any:
    """Load a checkpoint of any format.

    Never executes code from a file: pickles are read by torch's restricted unpickler (``weights_only=True``) or decoded
    without execution.

    Parameters
    ----------
    path : path-like
        The checkpoint; its format is found by looking at the files. Or a run: its folder for the last complete step,
        ``"RUN@1200"`` for a step, ``"RUN@best"`` or ``"RUN@best:METRIC"`` for the best one.
    into : nested state, optional
        Tensors and arrays to fill in place, on whatever device they are; the fastest way, because no new memory is
        touched. Names, shapes, dtypes and shared memory are compared first, and nothing is touched unless all of them
        fit. Tensors that share memory in the state must share it in the checkpoint as well.
    select : str or list of str, optional
        Globs on the names; only these tensors are read, and with ``into`` only these are filled. Tensors that are not
        selected are left out of dicts and replaced by None in lists.
    device : torch.device or str, optional
        Where new tensors go; the CPU by default.
    verify : bool
        Check every block that is read against its checksum, where the format has any.
    page_cache : bool
        Leave the files in the page cache, for other processes of this machine that load them as well. Otherwise only
        what is cached already is taken from there, and the rest is read directly, which is faster.
    format : str, optional
        The name of the format, instead of looking.
    progress : callable, optional
        Called with (bytes done, bytes in all), from the reading threads, one call at a time.
    threads : int, optional
        Reading threads; twice the cores, between 2 and 8, by default.
    memory_budget : int or str
        Limit in bytes for all buffers together, besides the tensors themselves, also as ``"256MiB"``.

    Returns
    -------
    state
        The state as it was saved; with ``into``, with the tensors, parameters and arrays that were given.

    Raises
    ------
    NotFoundError, NotACheckpointError
        If nothing is at the path, or not a checkpoint.
    CorruptCheckpointError
        If a byte is not what was written; it names the file, the tensor and the block. Tensors given to ``into`` may
        then be partly filled.
    StateMismatchError
        If ``into`` does not fit; nothing was touched.
    UsageError
        If a pattern matches nothing, the device does not exist, or arguments exclude each other.
    UnsupportedError, OutOfMemoryError, StoreError
        If the checkpoint has a dtype, class, codec or version that this installation does not know, the tensors are
        larger than the memory of this machine, or the disk failed.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = tensorkeep.save({"model": {"w": torch.ones(2), "b": torch.zeros(2)}, "step": 7}, f"{folder.name}/c")
    >>> tensorkeep.load(f"{folder.name}/c")["step"]
    7
    >>> weight = torch.empty(2)
    >>> _ = tensorkeep.load(f"{folder.name}/c", into={"model": {"w": weight}}, select="model.w")
    >>> weight
    tensor([1., 1.])
    >>> folder.cleanup()
    """
    settings = OpenSettings(verify=verify, page_cache=page_cache, pool=budget_pool(memory_budget))
    with settings.pool as pool, open_reader(checkpoint_path(path), settings, format) as reader:
        return load_open(reader, pool, LoadRequest(into, select, device, progress, threads))


def load_open(reader: Reader, pool: BufferPool, request: LoadRequest) -> Any:
    """Load from an open checkpoint; see `load`."""
    into, select, device = request.into, request.select, request.device
    if into is not None and device is not None:
        raise UsageError(
            "`into` and `device` exclude each other", remedy="leave out `device`: tensors in `into` keep their devices"
        )
    threads = thread_count(request.threads)
    check_device(device)
    chosen = list(reader.entries) if select is None else names.select(reader.entries, select)
    skeleton = reader.flat.skeleton if select is None else prune(reader.flat.skeleton, set(chosen))
    given = {} if into is None else match_targets(state_leaves(into), reader, chosen, partial=select is not None)
    plan = LoadPlan(reader, chosen, given, device)
    plan.read(threads, pool, request.progress)
    return rebuild(reader, skeleton, plan.values(), as_given=into is not None)


def rebuild(reader: Reader, skeleton: object, values: Mapping[str, Any], *, as_given: bool) -> Any:
    """Return the state that a skeleton describes, with these values for its tensors; see `unflatten`.

    Raises CorruptCheckpointError if a value of the skeleton cannot be rebuilt.
    """
    try:
        return unflatten(skeleton, values, as_is=as_given)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, path=reader.path, remedy=error.remedy) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"its structure cannot be rebuilt ({error})", path=reader.path, remedy="take another checkpoint or copy"
        ) from error
