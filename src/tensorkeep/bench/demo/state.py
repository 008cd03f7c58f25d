"""The state and the folder of the demo."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorkeep.bench.checkpoint.models import build, parse
from tensorkeep.bench.checkpoint.probes import check_capacity
from tensorkeep.bench.checkpoint.state_pair import COPIES_IN_MEMORY, StatePair
from tensorkeep.checkpoint.info import info
from tensorkeep.checkpoint.loading import load
from tensorkeep.errors import StoreError

DEFAULT_SCALE = 0.1
SEED = 20_240_601
_COPIES_ON_DISK = 3
_OVERHEAD_BYTES = 512 * 1024**2


@contextmanager
def temporary_folder(directory: Path) -> Iterator[Path]:
    """Make a folder in ``directory``, and remove it with its content at the end; StoreError if it cannot be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="tensorkeep-demo-", dir=directory)
    except OSError as error:
        message = f"cannot write here: {error.strerror}"
        raise StoreError(message, path=directory, remedy="choose a folder with --dir") from error
    with folder as path:
        yield Path(path)


def scale_of_size(nbytes: int) -> float:
    """Return the scale at which OpenLLaMA-3B has about so many bytes."""
    return nbytes / parse("openllama-3b").nbytes


def build_states(folder: Path, source: Path | None, scale: float) -> StatePair:
    """Load a checkpoint, or build OpenLLaMA-3B at a scale; StoreError if memory or disk do not suffice."""
    spec = f"openllama-3b:scale={scale:.10f}"
    nbytes = parse(spec).nbytes if source is None else info(source).total.nbytes
    disk, memory = _COPIES_ON_DISK * nbytes, COPIES_IN_MEMORY * nbytes
    check_capacity(folder, disk=disk + _OVERHEAD_BYTES, memory=memory + _OVERHEAD_BYTES)
    return StatePair(build(spec, seed=SEED) if source is None else load(source))
