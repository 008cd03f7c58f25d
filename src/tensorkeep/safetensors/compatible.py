"""What all of ``tensorkeep.safetensors`` shares: errors, arguments, and the writing of one file."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from tensorkeep.checkpoint.saving import save
from tensorkeep.errors import (
    NotFoundError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats.blockfile.plan import SUFFIX
from tensorkeep.formats.safetensors.reader import begins_like_safetensors
from tensorkeep.paths import checked_path
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Array
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import store_errors

Framework = Literal["pt", "np"]
_FRAMEWORKS: dict[str, Framework] = {
    **dict.fromkeys(("pt", "torch", "pytorch"), "pt"),
    **dict.fromkeys(("np", "numpy"), "np"),
}
BACKENDS = ("mmap", "pread")


@contextmanager
def safetensor_errors() -> Iterator[None]:
    """Make errors of Tensorkeep also a `SafetensorError`, which callers of safetensors catch."""
    try:
        yield
    # safetensors raises a plain FileNotFoundError as well.
    except (SafetensorError, NotFoundError):
        raise
    except TensorkeepError as error:
        kind = _both_errors(type(error))  # type: ignore[arg-type]  # mypy: a class with __hash__ is not hashable
        both = kind.__new__(kind, *error.args)
        vars(both).update(vars(error))
        raise both from None


@cache
def _both_errors(kind: Any) -> type[TensorkeepError]:
    """Return a class that is an error of Tensorkeep and a `SafetensorError`."""
    return type(kind.__name__, (kind, SafetensorError), {"__module__": kind.__module__})


def bytes_of_file(serialize: Callable[..., bytes], tensors: Mapping[str, Any], metadata: Any) -> bytes:
    """Return tensors as the bytes of a file, by a function of safetensors unless it lacks one of their dtypes."""
    content = None if metadata is None else dict(metadata)
    if all(BY_NAME[str(each.dtype).removeprefix("torch.")].tag(tuple(each.shape)) for each in tensors.values()):
        return serialize(tensors, metadata=content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"tensors{SUFFIX}")
        write_file(tensors, path, content)
        return path.read_bytes()


def framework_of(name: str) -> Framework:
    """Return the framework of a name; UnsupportedError if it is not torch or numpy."""
    found = _FRAMEWORKS.get(name)
    if found is None:
        raise UnsupportedError(
            f"the framework {name!r} is not supported", remedy='give "pt" or "np", and convert the arrays'
        )
    return found


def check_backend(backend: str) -> None:
    """Raise UsageError unless it is one of safetensors' backends, which read the same bytes."""
    if backend not in BACKENDS:
        raise UsageError(f"the backend {backend!r} does not exist", remedy=f"give one of {', '.join(BACKENDS)}")


def checked_tensors(tensors: Any, kind: type) -> dict[str, Any]:
    """Return a flat dict of tensors or arrays of one kind; UsageError if it is anything else."""
    if not isinstance(tensors, Mapping):
        raise UsageError(f"a {type(tensors).__name__} is not a dict of tensors", remedy="give names and tensors")
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, kind):
            remedy = "flatten the dict" if isinstance(value, Mapping) else "convert it, or leave it out"
            raise UsageError(
                f"a {type(value).__name__} at {name!r} is not a {kind.__name__} with a name",
                remedy=f"{remedy}; tensorkeep.save stores nested states of tensors, arrays and plain values",
            )
    return dict(tensors)


def write_file(tensors: Mapping[str, Array], filename: PathLike, metadata: Mapping[str, str] | None) -> None:
    """Write one safetensors file of any name, with this metadata only; an existing safetensors file is replaced."""
    place = Path(checked_path(filename))
    write = partial(
        save, dict(tensors), format="safetensors", overwrite=True, metadata=dict(metadata or {}), framework=None
    )
    if place.suffix == SUFFIX:
        write(place)
        return
    # By another name, the format would write a directory: the file is renamed when it is complete.
    with Commit(place, directory=False, overwrite=True, replaceable=begins_like_safetensors) as commit:
        whole = commit.path.with_name(f"model{SUFFIX}")
        try:
            write(whole)
        except TensorkeepError as error:
            error.path = os.fspath(place)
            raise
        with store_errors(place, "save here"):
            os.rename(whole, commit.path)
        commit.publish()
