"""Writing a ``torch.save`` file: torch pickles the state, its storages are copied, hashed and written here."""

import functools
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pickle import PickleError

from tensorkeep.errors import UnsupportedError, UnsupportedLeafError, first_line
from tensorkeep.formats.torch_file.stream import TorchStream
from tensorkeep.formats.torch_file.unpickle import restricted_load
from tensorkeep.formats.write import BLOCK_BYTES, WriteResult, WriteSettings
from tensorkeep.io import parallel
from tensorkeep.io.commit import Commit
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Leaf, Source, allocate
from tensorkeep.state.skeleton_reader import LeafSpec
from tensorkeep.state.strided import Array, is_lazy
from tensorkeep.state.tree import Flat, leaf_specs, unflatten


def write(
    flat: Flat[Source], destination: Path, settings: WriteSettings, replaceable: Callable[[Path], bool]
) -> WriteResult:
    """Write a state as one file; see `tensorkeep.formats.base.Format.write`."""
    _check_settings(destination, settings)
    specs = leaf_specs(flat.skeleton)
    _check_readable(flat, specs)
    with Commit(destination, directory=False, overwrite=settings.overwrite, replaceable=replaceable) as commit:
        values, copied = _materialise(flat, specs, settings.threads)
        meter = parallel.Meter(sum(leaf.nbytes for leaf in flat.leaves.values()), settings.progress)
        with TorchStream(commit.path, meter=meter) as stream:
            stream.save(unflatten(flat.skeleton, values))
            size = stream.finish()
        commit.publish()
    return WriteResult(stored_bytes=size, new_bytes=size, peak_buffer_bytes=copied)


def _check_settings(destination: Path, settings: WriteSettings) -> None:
    if settings.compression != "none":
        remedy = 'use compression="none", or format="native"'
        text = f"torch files cannot be compressed with {settings.compression!r}"
        raise UnsupportedError(text, path=destination, remedy=remedy)
    if settings.metadata:
        remedy = "put it into the state, or leave it out (drop_metadata=True)"
        raise UnsupportedError("torch files cannot store metadata", path=destination, remedy=remedy)


def _check_readable(flat: Flat[Source], specs: Mapping[str, LeafSpec]) -> None:
    """Refuse a state that ``torch.load(weights_only=True)`` would refuse, by loading one of empty tensors."""
    import torch

    stand_ins: dict[tuple[str, str], Array] = {}
    values: dict[str, Array] = {}
    for name, spec in specs.items():
        if spec.kind not in ("tensor", "parameter"):
            raise UnsupportedLeafError(
                "a numpy array in a torch file cannot be loaded without running code from the file",
                name=name,
                remedy='save torch.from_numpy(x), or use format="native"',
            )
        source = flat.leaves[flat.aliases[name].of if name in flat.aliases else name]
        empty = allocate(spec.kind, source.dtype, (0,))
        values[name] = stand_ins.setdefault((spec.kind, source.dtype.name), empty)
    state = unflatten(flat.skeleton, values)
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        restricted_load(file)
    except RuntimeError as error:
        # Torch cannot create tensors of some dtypes, such as float8, with gradients.
        raise UnsupportedError(
            f"torch.load would fail on the file that torch.save makes of this state ({first_line(error)})",
            remedy='detach its tensors from their gradients, or use format="native"',
        ) from error
    # AttributeError and TypeError: classes that cannot be imported.
    except (PickleError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL ([^\s,]+)|<class '([^']+)'>", str(error))
        what = f"a {found[1] or found[2]}" if found else "a value of this state"
        raise UnsupportedError(
            f"{what} in a torch file cannot be loaded without running code from the file",
            remedy='save it as plain values, lists, dicts and tensors, or use format="native"',
        ) from error


def _materialise(flat: Flat[Source], specs: Mapping[str, LeafSpec], threads: int) -> tuple[dict[str, Array], int]:
    """Return the data of every leaf, aliases included, and the bytes that were copied for it."""
    values: dict[str, Array] = {}
    tasks: list[Callable[[], None]] = []
    copied = 0
    storages: set[int] = set()
    for name, source in flat.leaves.items():
        if isinstance(source, Leaf) and fills_its_storage(source) and source.array.data_ptr() not in storages:
            values[name] = source.array
            storages.add(source.array.data_ptr())
        else:
            values[name] = allocate(specs[name].kind, source.dtype, source.shape)
            tasks += _reads(source, values[name])
            copied += source.nbytes
    parallel.run(tasks, threads)
    for name, alias in flat.aliases.items():
        values[name] = make_view(values[alias.of], alias)
    return values, copied


def fills_its_storage(leaf: Leaf) -> bool:
    """Return whether a tensor is all of its storage.

    torch saves storages, so saving a row would save the full matrix.
    """
    tensor = leaf.array
    return bool(not is_lazy(tensor) and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == leaf.nbytes)


def _reads(source: Source, array: Array) -> Iterator[Callable[[], None]]:
    made = Leaf.of(source.name, array)
    out = made.host_bytes() if made else None
    if out is None:
        raise AssertionError(f"{source.name}: no contiguous memory to read into")
    for start in range(0, source.nbytes, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, source.nbytes)
        yield functools.partial(source.read, start, stop, out[start:stop])
