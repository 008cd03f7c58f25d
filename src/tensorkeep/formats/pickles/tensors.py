"""Tensors in recorded pickles: over the storages of a file, without a copy."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tensorkeep.formats.pickles.inert_pickle import Call, Global, Pairs, PersistentId, name_of
from tensorkeep.placeholder import Placeholder

if TYPE_CHECKING:
    import torch

    Storages = Callable[[str, int], torch.UntypedStorage]
    """Returns the storage of a key, of some bytes; ValueError if it does not exist."""

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""The dtype of each class of storages in a pickle."""

READ_WITH_TORCH = "load the file with torch, and save"


class Rebuilder(Protocol):
    """What rebuilds the values around the tensors of a pickle; see ``rebuild.py``."""

    attributes: dict[str, None]
    storages: "Storages"

    def value(self, found: Any, depth: int = 0) -> Any:
        """Return the value of what was recorded."""

    def call(self, call: Call, depth: int) -> Any:
        """Return the value of a call."""

    def object(self, name: str, call: Call, depth: int) -> Any:
        """Return an object of an allowed class as a dict."""

    def container(self, found: Any, made: Any) -> Any:
        """Note the value that what was recorded has, and return it."""

    def spend(self, *values: Any) -> None:
        """Count what is copied; UnsupportedError if it is much more than the file has."""

    def is_allowed(self, name: str) -> bool:
        """Return whether objects of a class are read."""

    def refused(self, name: str) -> Placeholder:
        """Return what takes the place of an object of a class that is not allowed."""


Rebuild = Callable[[Rebuilder, Call, int], Any]


def _storage(rebuilder: Rebuilder, found: Any) -> Any:
    import torch

    key = found.key if type(found) is PersistentId else None
    if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage" or type(key[1]) is not Global:
        raise ValueError("a tensor has no storage")
    kind = key[1].name.rpartition(".")[2]
    dtype = torch.uint8 if kind == "UntypedStorage" else getattr(torch, STORAGES[kind])
    size = torch.empty(0, dtype=dtype).element_size()
    nbytes, start = _count(key[4]) * size, 0
    if type(key[2]) is not str:
        raise ValueError("a storage has no key")
    whole = rebuilder.storages(key[2], nbytes)
    if len(key) == 6 and key[5] is not None:
        _, first, length = key[5]
        start, nbytes = _count(first) * size, _count(length) * size
        whole = whole[start : start + nbytes]
    return torch.TypedStorage(wrap_storage=whole, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _tensor(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    import torch

    first, offset, size, stride, *rest = call.args
    strides = rebuilder.value(stride, depth + 1)
    if type(strides) is not tuple or any(_count(step) < 0 for step in strides):
        raise ValueError("a tensor has no strides")
    size = torch.Size(rebuilder.value(size, depth + 1))
    storage, grad = _storage(rebuilder, first), rest[0] if rest else False
    rest = [rebuilder.value(each, depth + 1) for each in rest[2:]]  # without hooks
    utils: Any = torch._utils
    if call.function.name == "_rebuild_tensor":
        return utils._rebuild_tensor(storage, offset, size, strides)
    rebuild = utils._rebuild_tensor_v3 if call.function.name.endswith("v3") else utils._rebuild_tensor_v2
    return rebuild(storage, offset, size, strides, grad, OrderedDict(), *rest)


def _parameter(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    import torch

    data = rebuilder.value(call.args[0], depth + 1)
    leave_attributes(rebuilder, call.args[3:])
    return torch.nn.Parameter(data, call.args[1]) if isinstance(data, torch.Tensor) else data


def _of_type(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    """Return a tensor that has attributes, or a tensor of a subclass.

    A subclass that wraps other tensors is a dict of its attributes, any other subclass a plain tensor.
    """
    function, kind, arguments, state = call.args
    name = name_of(kind)
    if not name:
        raise ValueError("a tensor has no class")
    if name not in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"):
        if not rebuilder.is_allowed(name):
            return rebuilder.refused(name)
        if function.name == "_rebuild_wrapper_subclass":
            made = Call(kind, ())
            made.state = state
            return rebuilder.container(call, rebuilder.object(name, made, depth))
    leave_attributes(rebuilder, [state])
    return rebuilder.call(Call(function, arguments), depth + 1)


def leave_attributes(rebuilder: Rebuilder, states: Iterable[Any]) -> None:
    """Note the names of attributes that the state does not have."""
    for state in states:
        found = attributes_of(state) or []
        rebuilder.spend(found)
        rebuilder.attributes |= {key: None for key, _ in found if type(key) is str and not key.startswith("_")}


def _on_device(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    """Return a tensor that was saved by way of the CPU or numpy."""
    import torch

    data, dtype = rebuilder.value(call.args[0], depth + 1), rebuilder.value(call.args[1])
    if not isinstance(data, Placeholder) and not isinstance(data, torch.Tensor):
        data = torch.from_numpy(data)
    if isinstance(data, Placeholder) or data.dtype == dtype:
        return data
    return Placeholder("", f"a tensor of {dtype} that was saved as {data.dtype}", f"{READ_WITH_TORCH} x.cpu()")


def attributes_of(state: Any) -> list[tuple[Any, Any]] | None:
    """Return the attributes in the state of an object, also those of slots; None if it is something else."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if any(part is not None and type(part) is not Pairs for part in parts):
        return None
    return [pair for part in parts for pair in part or ()]


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**62:
        raise ValueError("an offset, length or stride is impossible")
    return found


def _unreadable(what: str, remedy: str) -> Rebuild:
    return lambda rebuilder, call, depth: Placeholder("", what, f"{READ_WITH_TORCH} {remedy}")


_UTILS = "torch._utils._rebuild"
TENSORS: dict[str, Rebuild] = {
    f"{_UTILS}_tensor": _tensor,
    f"{_UTILS}_tensor_v2": _tensor,
    f"{_UTILS}_tensor_v3": _tensor,
    f"{_UTILS}_parameter": _parameter,
    f"{_UTILS}_parameter_with_state": _parameter,
    f"{_UTILS}_device_tensor_from_cpu_tensor": _on_device,
    f"{_UTILS}_device_tensor_from_numpy": _on_device,
    f"{_UTILS}_sparse_tensor": _unreadable("a sparse tensor", "x.to_dense(), or its indices and values"),
    f"{_UTILS}_qtensor": _unreadable("a quantised tensor", "x.int_repr() with its scale and zero point"),
    f"{_UTILS}_nested_tensor": _unreadable("a nested tensor", "x.unbind() as a list"),
    f"{_UTILS}_meta_tensor_no_storage": _unreadable("a tensor on the meta device, without data", "one with data"),
    f"{_UTILS}_wrapper_subclass": _unreadable("a tensor that wraps others", "the tensors that it consists of"),
    "torch._tensor._rebuild_from_type": _of_type,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _unreadable("a torch.layout", "its name"),
    "torch.Tensor": _unreadable("a tensor of torch before version 0.4", "it again"),
    "torch._tensor.Tensor": _unreadable("a tensor of torch before version 0.4", "it again"),
    "torch.nn.parameter.Parameter": _unreadable("a parameter of torch before version 0.4", "it again"),
}
"""What rebuilds tensors, by its full name."""
