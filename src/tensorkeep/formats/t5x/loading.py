"""Loading a T5X checkpoint as T5X does: open every array, read it whole, convert back; for comparisons.

`tensorkeep.load` reads straight into the tensors' memory, in pieces and checked. Here each array is read by one call.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tensorkeep.errors import PathLike
from tensorkeep.formats.t5x.contents import Stored, look
from tensorkeep.formats.tensorstore.loading import ReadLimits, read_whole
from tensorkeep.formats.tensorstore.specs import Place
from tensorkeep.formats.tensorstore.walking import check_folders
from tensorkeep.io.directory import Directory
from tensorkeep.state.aliases import make_view

if TYPE_CHECKING:
    import torch


def load_arrays(
    path: PathLike,
    *,
    concurrency: int | None = None,
    in_flight: str = "all",
    memory: int | str | None = None,
) -> dict[str, torch.Tensor]:
    """Read every array of a T5X checkpoint whole.

    Parameters
    ----------
    path : path-like
        What `tensorkeep.save` wrote with ``format="t5x"``, or T5X.
    concurrency : int, optional
        TensorStore's limit on file operations at once; its default unless given.
    in_flight : str
        ``"one"``: each array is opened and read to the end before the next; ``"all"``: all at once.
    memory : int or str, optional
        The most bytes of arrays that are being read at once, as they are stored, with ``in_flight="all"``; a larger
        array is read alone. 1 GiB by default.

    Returns
    -------
    dict of str to torch.Tensor
        By name, in the dtype that was saved where our own file tells it, else in the stored one.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError, UsageError, MissingExtraError
    """
    limits = ReadLimits.of(concurrency, in_flight, memory)
    with Directory(Path(path)) as directory:
        root = f"{directory.fd_path}/"
        contents = look(directory)
        check_folders(root, (wanted.key for wanted in contents.wanted.values()), directory.path)
        tensors = read_whole(directory.path, Place(root), contents.wanted, limits)
        tensors |= {name: _tensor(stored) for name, stored in contents.inline.items()}
    return tensors | {name: make_view(tensors[alias.of], alias) for name, alias in contents.aliases.items()}


def _tensor(stored: Stored) -> torch.Tensor:
    import torch

    if stored.content is None:
        raise AssertionError("a tensor that lies in an array is not inline")
    return torch.from_numpy(stored.content.copy()).view(stored.dtype.torch).reshape(stored.shape)
