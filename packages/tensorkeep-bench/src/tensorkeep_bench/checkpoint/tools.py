"""The tools that the bench measures: each saves and loads a state as its users would write it."""

import json
import math
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tensorkeep import load, save
from tensorkeep.errors import UsageError
from tensorkeep.ext.formats import FORMATS, find_codec
from tensorkeep.ext.state import flatten, make_view
from tensorkeep.ext.storage import DEFAULT_BUDGET, LocalDirectory, default_threads
from tensorkeep_bench.results import Settings
from tensorkeep_bench.workload import convert

Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]


# A new tool is a subclass, an entry in `_KINDS`, and an arm of an experiment.
class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="tool"):
    """One way to save and load a state."""

    suffix: ClassVar[str] = ".ckpt"  # suffix of the paths that it writes
    package: ClassVar[str | None] = None  # package that it needs beyond Tensorkeep's own dependencies
    # Whether `load` only maps the file. The bench then reads a byte of every page within the measured time.
    maps_files: ClassVar[bool] = False
    # Whether it stores nested states and plain values. Other tools get a flat dict of tensors.
    nested: ClassVar[bool] = False
    # How a user saves with it; `use` writes the settings in place of the braces.
    call: ClassVar[str]

    @property
    def durable(self) -> bool:
        """Whether `save` returns only after the files and their directory entries are on the disk."""
        return False

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        return convert(settings, cls, what=f"tool {cls.__struct_config__.tag!r}")

    @classmethod
    def use(cls, options: Mapping[str, object]) -> str:
        """Return the Python call by which a user saves like this tool with these settings."""
        return cls.call.format("".join(f", {name}={value!r}" for name, value in options.items()))

    def missing(self) -> str | None:
        """Return why the tool cannot run on this machine, or None."""
        # `find_spec` does not import the package.
        if self.package is None or find_spec(self.package) is not None:
            return None
        return f"the package {self.package!r} is not installed"

    def view(self, state: Any) -> Any:
        if self.nested:
            return state
        # A state that is a single tensor has an empty name, which not every tool accepts as a key.
        return {
            leaf.name or "state": leaf.array if leaf.is_torch else torch.from_numpy(np.asarray(leaf.array))
            for leaf in flatten(state).leaves.values()
        }

    @abstractmethod
    def save(self, state: Any, path: Path) -> None:
        """Write the result of `view` to ``path``, which does not exist yet."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Return the saved state, in new memory."""

    def load_into(self, path: Path, state: Any) -> None:
        """Fill the tensors of ``state``, which `view` returned for a state of the same structure."""
        # For tools that cannot load into existing tensors, as their users would: load, then copy.
        targets = flatten(state).leaves
        for name, leaf in flatten(self.load(path)).leaves.items():
            if leaf.is_torch:
                targets[name].array.copy_(leaf.array)
            else:
                np.copyto(targets[name].array, leaf.array)


class TensorkeepTool(Tool, frozen=True, tag="tensorkeep"):
    compression: str = "none"
    direct_io: bool = True  # bypass the page cache when writing, where the file system supports it
    threads: Threads | None = None  # threads that write and read; None for the defaults of `save` and `load`
    verify: bool = True  # verify the checksum of every block that is loaded

    call: ClassVar[str] = "tensorkeep.save(state, path{})"
    nested: ClassVar[bool] = True

    @classmethod
    def use(cls, options: Mapping[str, object]) -> str:
        # `save` has no option for loads.
        return super().use({name: value for name, value in options.items() if name != "verify"})

    @property
    def durable(self) -> bool:
        return True

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        tool = super().parse(settings)
        if tool.compression != "auto":
            # A codec with a typo is refused now, not in every cell.
            find_codec(tool.compression)
        return tool

    def save(self, state: Any, path: Path) -> None:
        save(
            state,
            path,
            compression=self.compression,
            threads=default_threads() if self.threads is None else self.threads,
            memory_budget=DEFAULT_BUDGET,
            direct_io=self.direct_io,
        )

    def load(self, path: Path) -> Any:
        return load(path, verify=self.verify, threads=self.threads)

    def load_into(self, path: Path, state: Any) -> None:
        load(path, into=state, verify=self.verify, threads=self.threads)


class TorchTool(Tool, frozen=True, tag="torch"):
    """``torch.save`` and ``torch.load(weights_only=True)``."""

    crc32: bool = True  # whether ``torch.save`` computes the CRC-32 of every record, as it does by default

    call: ClassVar[str] = "torch.save(state, path)"
    suffix: ClassVar[str] = ".pt"
    nested: ClassVar[bool] = True

    @classmethod
    def use(cls, options: Mapping[str, object]) -> str:
        crc32 = options.get("crc32", True)
        return cls.call if crc32 else f"torch.serialization.set_crc32_options(False); {cls.call}"

    def save(self, state: Any, path: Path) -> None:
        # The option is global, so other saves of the process must not see it.
        default = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(self.crc32)
        try:
            torch.save(state, path)
        finally:
            torch.serialization.set_crc32_options(default)

    def load(self, path: Path) -> Any:
        # A training state also holds numpy arrays, such as the states of random generators.
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, weights_only=True)


def _numpy_globals() -> list[Any]:
    from numpy._core.multiarray import _reconstruct, scalar

    # The globals in the pickle of a numpy array; they run no code from the file.
    kinds = [each for each in vars(np.dtypes).values() if isinstance(each, type)]
    return [_reconstruct, scalar, np.ndarray, np.dtype, *kinds]


class SafetensorsTool(Tool, frozen=True, tag="safetensors"):
    """``safetensors.torch.save_file`` and ``load_file``: a flat dict of contiguous tensors that share no memory."""

    call: ClassVar[str] = "safetensors.torch.save_file(tensors, path)"
    suffix: ClassVar[str] = ".safetensors"
    maps_files: ClassVar[bool] = True

    def save(self, state: Any, path: Path) -> None:
        # It refuses tensors that are not contiguous, so its users have to copy them.
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)

    def load(self, path: Path) -> Any:
        return load_file(path)


class DcpTool(Tool, frozen=True, tag="dcp"):
    """``torch.distributed.checkpoint`` in one process, with its file system writer and reader."""

    threads: Threads = 1  # threads of the writer; each writes one file

    call: ClassVar[str] = (
        "torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(path{}), no_dist=True)"
    )

    @classmethod
    def use(cls, options: Mapping[str, object]) -> str:
        return super().use({"thread_count": options["threads"]} if "threads" in options else {})

    def save(self, state: Any, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(path, thread_count=self.threads)
        with _without_process_group_warning():
            save(state, storage_writer=writer, no_dist=True)

    def load(self, path: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        # The public `load` only fills existing tensors; this is the way to new ones.
        with _without_process_group_warning():
            return _load_state_dict_from_keys(storage_reader=FileSystemReader(path))

    def load_into(self, path: Path, state: Any) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _without_process_group_warning():
            load(state, storage_reader=FileSystemReader(path), no_dist=True)


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process without a process group is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is .*", category=UserWarning)
        yield


_T5X_CONCURRENCY = 128
_ARRAY_MEMORY = "4GiB"  # memory for arrays in flight: enough that it limits none of the settings that are measured
_MAX_IN_FLIGHT = 1024**3  # bytes of arrays, as stored, after which the next read waits for earlier ones


class TensorstoreTool(Tool, frozen=True, tag="tensorstore"):
    """`tensorkeep.save` with ``format="tensorstore"``; the settings are its options."""

    options: Settings

    call: ClassVar[str] = "tensorkeep.save(state, path, format='tensorstore'{})"
    suffix: ClassVar[str] = ".arrays"
    package: ClassVar[str | None] = "tensorstore"
    format: ClassVar[str] = "tensorstore"

    @classmethod
    def parse(cls, settings: Mapping[str, object]) -> Self:
        FORMATS.get(cls.format).parse_options(settings)
        return cls(dict(settings))

    @property
    def durable(self) -> bool:
        return self.options.get("sync") is not False

    def save(self, state: Any, path: Path) -> None:
        save(state, path, format=self.format, threads=default_threads(), memory_budget=_ARRAY_MEMORY, **self.options)

    def load(self, path: Path) -> Any:
        # As users of TensorStore load: open and read full arrays, and convert them back. `tensorkeep.load` instead
        # reads ranges of the arrays straight into the memory of the tensors.
        return load_tensorstore(path, **self._read_options())

    def _read_options(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key in ("concurrency", "in_flight")}


class T5xTool(TensorstoreTool, frozen=True, tag="t5x"):
    """`tensorkeep.save` with ``format="t5x"``: the same arrays in T5X's layout, with T5X's settings as defaults."""

    call: ClassVar[str] = "tensorkeep.save(state, path, format='t5x'{})"
    suffix: ClassVar[str] = ".t5x"
    format: ClassVar[str] = "t5x"

    def load(self, path: Path) -> Any:
        return load_t5x(path, **{"concurrency": _T5X_CONCURRENCY, **self._read_options()})


InFlight = Literal["one", "all"]


def load_tensorstore(
    path: Path, *, concurrency: int | None = None, in_flight: InFlight = "all"
) -> dict[str, torch.Tensor]:
    """Read every array of a TensorStore checkpoint that Tensorkeep saved, in the dtype that was saved."""
    from tensorkeep_formats.tensorstore.reader import read_own

    with LocalDirectory(path) as directory:
        notes, arrays, known = read_own(directory)
        return _with_aliases(_read_arrays(arrays, known, concurrency, in_flight), notes.structure)


def load_t5x(path: Path, *, concurrency: int | None = None, in_flight: InFlight = "all") -> dict[str, torch.Tensor]:
    from tensorkeep_formats.t5x import read_contents

    with LocalDirectory(path) as directory:
        contents = read_contents(directory)
        tensors = _read_arrays(contents.directory, contents.arrays, concurrency, in_flight)
    for name, tensor in contents.inline.items():
        tensors[name] = torch.from_numpy(tensor.content.copy()).view(tensor.dtype.torch).reshape(tensor.shape)
    return _with_aliases(tensors, contents.structure)


def _with_aliases(tensors: dict[str, torch.Tensor], structure: Any) -> dict[str, torch.Tensor]:
    aliases = structure.flat({}).aliases
    return tensors | {name: make_view(tensors[alias.of], alias) for name, alias in aliases.items()}


def _read_arrays(
    directory: Any, known: Mapping[str, Any], concurrency: int | None, in_flight: InFlight
) -> dict[str, torch.Tensor]:
    from tensorkeep_formats.tensorstore.library import context
    from tensorkeep_formats.tensorstore.reader import check_array, start_open

    # TensorStore's limit on concurrent file operations.
    limits = context(concurrency=concurrency)
    # Lazy: with ``"one"``, each array is opened and read before the next.
    opening: Iterable[Any] = (
        start_open(directory, each, limits, fill_missing=each.types is None) for each in known.values()
    )
    most = 0
    if in_flight == "all":
        opening, most = [*opening], _MAX_IN_FLIGHT
    tensors: dict[str, torch.Tensor] = {}
    reading: deque[tuple[str, int, Any, Any]] = deque()
    bytes_in_flight = 0
    for name, opened in zip(known, opening, strict=True):
        with directory.reading(name):
            array = check_array(name, known[name], opened.result(), directory)
            size = math.prod(array.shape) * array.types.stored.itemsize
            reading.append((name, size, array.store.read(order="C"), array.types))
        bytes_in_flight += size
        while reading and (bytes_in_flight > most or len(tensors) + len(reading) == len(known)):
            earlier, size, content, types = reading.popleft()
            with directory.reading(earlier):
                tensors[earlier] = _tensor(content.result(), types)
            bytes_in_flight -= size
    return tensors


def _tensor(content: npt.NDArray[Any], types: Any) -> torch.Tensor:
    if types.converts:
        return torch.from_numpy(content).to(types.dtype.torch)
    # By bytes, because torch does not accept every dtype of numpy, such as bfloat16.
    flat = torch.from_numpy(content.reshape(-1).view(np.uint8))
    return flat.view(types.dtype.torch).reshape(content.shape)


class OrbaxTool(Tool, frozen=True, tag="orbax"):
    """Orbax's synchronous ``PyTreeCheckpointer`` on numpy arrays, with its defaults (OCDBT, its own compression)."""

    call: ClassVar[str] = "orbax.checkpoint.PyTreeCheckpointer().save(path, arrays)"
    package: ClassVar[str | None] = "orbax"

    def save(self, state: Any, path: Path) -> None:
        import orbax.checkpoint as ocp

        ocp.PyTreeCheckpointer().save(path.absolute(), to_arrays(state))

    def load(self, path: Path) -> Any:
        import orbax.checkpoint as ocp

        return to_tensors(ocp.PyTreeCheckpointer().restore(path.absolute()))


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Return CPU tensors as numpy arrays that share their memory, bfloat16 by ``ml_dtypes``."""
    import ml_dtypes

    return {
        # numpy has no bfloat16 of its own.
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in tensors.items()
    }


def to_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.asarray(array).view(np.uint16)).view(torch.bfloat16)
        if array.dtype.name == "bfloat16"
        else torch.from_numpy(np.asarray(array))
        for name, array in arrays.items()
    }


class ZipnnTool(Tool, frozen=True, tag="zipnn"):
    """``ZipNN.compress``, a codec for tensors: a line of JSON and the compressed bytes for each tensor in one file."""

    threads: Threads = 2

    call: ClassVar[str] = "zipnn.ZipNN(bytearray_dtype=dtype{}).compress(tensor_bytes)"
    suffix: ClassVar[str] = ".znn"
    package: ClassVar[str | None] = "zipnn"
    least_bytes: ClassVar[int] = 4096
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    def save(self, state: Any, path: Path) -> None:
        with path.open("xb") as file:
            for name, tensor in state.items():
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                dtype = str(tensor.dtype).removeprefix("torch.")
                # Other tensors are stored as they are.
                compressed = raw.nbytes >= self.least_bytes and dtype in self.dtypes
                # zipnn overwrites its input, so it gets a copy; it crashes on inputs of a few bytes.
                stored = self._codec(dtype).compress(bytearray(raw)) if compressed else raw.data
                file.write(json.dumps([name, dtype, list(tensor.shape), len(stored), compressed]).encode() + b"\n")
                file.write(stored)

    def load(self, path: Path) -> Any:
        loaded = {}
        with path.open("rb") as file:
            while header := file.readline():
                name, dtype, shape, length, compressed = json.loads(header)
                stored = file.read(length)
                raw = self._codec(dtype).decompress(stored) if compressed else bytearray(stored)
                bytes_ = torch.from_numpy(np.frombuffer(raw, np.uint8)) if raw else torch.empty(0, dtype=torch.uint8)
                loaded[name] = bytes_.view(getattr(torch, dtype))[: math.prod(shape)].view(shape)
        return loaded

    def _codec(self, dtype: str) -> Any:
        from zipnn import ZipNN

        return ZipNN(bytearray_dtype=dtype, threads=self.threads)


_KINDS = (TorchTool, SafetensorsTool, DcpTool, TensorstoreTool, T5xTool, OrbaxTool, ZipnnTool, TensorkeepTool)
_TOOLS: dict[str, type[Tool]] = {str(kind.__struct_config__.tag): kind for kind in _KINDS}

# The usual choices, the baseline first.
COMMON_TOOLS: dict[str, Tool] = {
    "torch": TorchTool(),
    "safetensors": SafetensorsTool(),
    "tensorkeep": TensorkeepTool(),
    "tensorkeep-lossless": TensorkeepTool(compression="lossless"),
}


def parse_tool(settings: Mapping[str, object]) -> Tool:
    """Return the tool that an arm's settings describe.

    Raises UsageError if the tool is unknown, or a setting is unknown, of another type, or out of range.

    Examples
    --------
    >>> parse_tool({"tool": "dcp", "threads": 2})
    DcpTool(threads=2)
    """
    name = settings.get("tool")
    if not isinstance(name, str) or name not in _TOOLS:
        problem = f"the tool {name!r} does not exist" if "tool" in settings else "the setting 'tool' is missing"
        raise UsageError(problem, remedy=f"tools: {', '.join(_TOOLS)}")
    return _TOOLS[name].parse({key: value for key, value in settings.items() if key != "tool"})


def use_of(settings: Settings) -> str:
    """Return the call by which a user saves like the tool of an arm's settings; "" if the tool is unknown.

    Examples
    --------
    >>> use_of({"tool": "tensorstore", "chunk": 262144, "compressor": None})
    "tensorkeep.save(state, path, format='tensorstore', chunk=262144, compressor=None)"
    """
    kind = _TOOLS.get(str(settings.get("tool")))
    return "" if kind is None else kind.use({name: value for name, value in settings.items() if name != "tool"})
