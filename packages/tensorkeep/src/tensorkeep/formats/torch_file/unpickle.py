"""Turns the recorded pickle of a torch file into a state, without calling anything that the file names."""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.torch_file.archive import STORAGES, Archive
from tensorkeep.formats.torch_file.pickles import Call, Global, Pairs, PersistentId, name_of
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Bytes
from tensorkeep.state.skeleton import MAX_DEPTH

if TYPE_CHECKING:
    import torch

    Storages = Callable[[str, int], torch.UntypedStorage]
    """Returns the storage of a key and a number of bytes; ValueError if it does not exist."""

# Names that run programs or code, which no checkpoint needs.
COMMANDS = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|runpy|importlib|ctypes|pty|code)(\..*)?"
    r"|builtins\.(eval|exec|compile|getattr|open|__import__)"
)
# Classes, or their full names.
Allow = str | type | Iterable[str | type]
_NUMPY_MODULES = ("numpy.core", "numpy._core")
# The names that pickles of numpy arrays and scalars call; allowed together as "numpy".
_NUMPY = {
    "numpy.dtype",
    "numpy.ndarray",
    *(f"{module}.multiarray.{name}" for module in _NUMPY_MODULES for name in ("scalar", "_reconstruct")),
    *(f"{module}.numeric._frombuffer" for module in _NUMPY_MODULES),
}


def allowed_names(allow: Allow | None) -> frozenset[str]:
    """Return the full names of the classes that a caller allows; "numpy" stands for what arrays and scalars call."""
    given = () if allow is None else (allow,) if isinstance(allow, str | type) else tuple(allow)
    names = [f"{one.__module__}.{one.__qualname__}" if isinstance(one, type) else one for one in given]
    for name in names:
        if name == "numpy":
            continue
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
            raise UsageError(
                f"{name!r} is not the full name of a class", remedy="give it with its module: argparse.Namespace"
            )
        if COMMANDS.fullmatch(name):
            raise UsageError(
                f"{name} cannot be allowed: it runs code, and is not a class of values",
                remedy="do not load a checkpoint that calls it",
            )
    return frozenset(names).union(_NUMPY if "numpy" in names else ()) - {"numpy"}


# Values that a state may have beyond the size of its pickle, because containers contain one another many times.
SHARED_VALUES = 1_000_000
TRUST = "if you trust it, load it with torch.load(weights_only=False) and save tensors and plain values"
_READ_WITH_TORCH = "load the file with torch, and save"
_PLAIN_ARRAYS = "save strings and objects as lists of plain values, e.g. x.tolist()"
_SCRIPT = "__torch__."  # the names of all classes of a TorchScript archive begin so
_GETATTR = "builtins.getattr"
_SURROGATES = re.compile("[\ud800-\udfff]")
_MOST_LETTERS, _MOST_ARGUMENTS = 200, 4
_SCALARS = (type(None), bool, int, float, str)
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_TOO_DEEP = Placeholder("", f"nested deeper than {MAX_DEPTH} levels", TRUST)


class Unpickled(NamedTuple):
    """The state of a torch file; ``refusal`` is the error for a load that keeps objects of classes not allowed."""

    state: Any
    refusal: UnsupportedError | None
    # Attributes of tensors and dicts that the state leaves out.
    attributes: list[str]
    storages: frozenset[str]
    # Values of a TorchScript archive that are not tensors.
    others: int = 0


def load_untrusted(content: Bytes, archive: Archive, path: Path, allow: Collection[str] = ()) -> Unpickled:
    """Return the state of a file; its tensors are views of ``content``, the file's bytes, and none of its code runs."""
    import torch

    whole = torch.from_numpy(content).untyped_storage()
    used: set[str] = set()

    def storage(key: str, nbytes: int) -> Any:
        used.add(key)
        start = archive.storage_start(key, content)
        return whole[start : start + nbytes]

    try:
        found, recorder = archive.recorded()
    except ValueError as error:
        if archive.checksummed:
            # Its CRC-32 is right, so the pickle is not damaged.
            raise UnsupportedError(f"its pickle cannot be decoded ({error})", path=path, remedy=TRUST) from error
        raise CorruptCheckpointError(f"its pickle is damaged ({error})", path=path) from error
    # Every name counts, even if no call uses it: the caller may load the file with torch next.
    names = [name for name in recorder.globals if not is_known(name) and name not in allow]
    # The classes of a TorchScript archive are its own code, which is not read.
    names = sorted(name for name in names if not (archive.is_script and name.startswith(_SCRIPT)))
    refusal = None
    if names:
        text = f"its pickle calls {', '.join(names)}: loading it would run code from the file"
        # A file that runs commands is refused even if the caller wants only a part of the state.
        if command := next(filter(COMMANDS.fullmatch, names), None):
            remedy = f"do not load it elsewhere: a checkpoint has no use for {command}, which runs code"
            raise UnsupportedError(text, path=path, remedy=remedy)
        refusal = UnsupportedError(text, path=path, remedy=f'to read all else, select="*"; {_allow_remedy(names)}')
    # A value that is referenced twice may be copied twice, so the limit is a multiple of the pickle.
    rebuilder = StateRebuilder(storage, allow, SHARED_VALUES + 16 * archive.pickle_bytes, script=archive.is_script)
    try:
        state = rebuilder.value(found)
    except TensorkeepError as error:
        error.path = error.path or str(path)
        raise
    except MemoryError as error:
        raise OutOfMemoryError("there is not enough memory to open it", path=path) from error
    # Hostile bytes make torch raise almost any type.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        text = f"its pickle contradicts itself ({type(error).__name__}: {reason})"
        raise CorruptCheckpointError(text, path=path) from error
    if not archive.is_script:
        return Unpickled(state, refusal, [*rebuilder.attributes], frozenset(used))
    with decoding(path):
        count_values(state, SHARED_VALUES + 4 * archive.pickle_bytes)
    tensors: dict[str, Any] = {}
    others = _collect_tensors(state, "", tensors, set())
    if archive.constants and not tensors:
        raise UnsupportedError(
            "is a frozen TorchScript module: its weights are constants of its code, which have no names",
            path=path,
            remedy="save the state_dict of the module that torch.jit.freeze was called with",
        )
    return Unpickled(tensors, refusal, [*rebuilder.attributes], frozenset(used), others)


def is_known(name: str) -> bool:
    import torch

    module, _, own = name.rpartition(".")
    if module in ("torch", "torch.storage", "torch.cuda") and own.endswith("Storage"):
        return True
    return name in _KNOWN or (module == "torch" and isinstance(vars(torch).get(own), (torch.dtype, torch.qscheme)))


def _allow_remedy(names: Iterable[str]) -> str:
    short = dict.fromkeys("numpy" if name in _NUMPY else name for name in names if name != _GETATTR)
    listed = json.dumps([*short], ensure_ascii=False)
    return f"to read such objects as dicts, without running their code: allow={listed}"


def _collect_tensors(value: Any, name: str, found: dict[str, Any], parents: set[int]) -> int:
    """Put the tensors of a module's attributes under their dotted names; return the number of other values."""
    import torch

    if isinstance(value, torch.Tensor | Placeholder):
        # Detached, as in a state dict.
        found[name] = value.detach() if isinstance(value, torch.Tensor) else value
        return 0
    if not isinstance(value, dict | list | tuple) or id(value) in parents:
        return 1
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parents.add(id(value))
    others = sum(_collect_tensors(item, f"{name}.{key}" if name else str(key), found, parents) for key, item in items)
    parents.remove(id(value))
    return others


def count_values(state: object, limit: int) -> int:
    """Return the number of items in all containers of a state, counted as often as they are reached.

    A pickle of 60 lists that each contain the next one twice has 2**60 items. A container inside itself counts once.

    >>> count_values({"a": [1, 2]}, 10)
    5
    """
    count = 0
    parents: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(state, True)]
    while waiting:
        value, enters = waiting.pop()
        # Only parents are tracked: a container that is reached twice counts twice, a cycle counts once.
        if not enters:
            parents.remove(id(value))
        elif isinstance(value, dict | list | tuple | set) and id(value) not in parents:
            count += 1 + len(value)
            if count > limit:
                raise UnsupportedError(
                    f"its pickle expands to more than {limit:,} values",
                    remedy="its containers contain one another many times: save each once",
                )
            parents.add(id(value))
            waiting.append((value, False))
            waiting.extend((item, True) for item in (value.values() if isinstance(value, dict) else value))
    return count


# What torch's restricted unpickler would call is rebuilt from the recorded arguments. An object of an allowed class
# becomes a dict of its attributes: the class is neither imported nor called, so an allowed name cannot run code either.
# Every other value becomes a `Placeholder`, so that the rest of the file can be read.
class StateRebuilder:
    """Rebuilds the state of one recorded pickle; all calls together may handle ``limit`` elements or bytes."""

    def __init__(self, storages: "Storages", allow: Collection[str], limit: int, *, script: bool = False) -> None:
        self.attributes: dict[str, None] = {}
        self.storages = storages
        self._allow = allow
        self._script = script
        self._limit = self._left = limit
        self._built: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._open: set[int] = set()
        self._renamed = 1

    def value(self, found: Any, depth: int = 0) -> Any:
        """Return the value of what a `Recorder` returned; raises errors of any type if it contradicts itself."""
        if type(found) in (*_SCALARS, bytes, bytearray):
            return found
        if type(found) is Global:
            return self._global(found)
        if type(found) is PersistentId:
            return self._reference(found)
        key = id(found)  # unique, because everything that was recorded is kept until the state is complete
        if key in self._built:
            return self._built[key]
        # A list may contain itself, but the arguments of a call cannot contain its result.
        if key in self._open:
            return Placeholder("", "a value that is made from itself", TRUST)
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        # Containers register themselves in `_built` before their items are made; the final value replaces them.
        self._open.add(key)
        self._built[key] = made = self._make(found, depth)
        self._open.discard(key)
        return made

    def _make(self, found: Any, depth: int) -> Any:
        if type(found) is Call:
            made = self.call(found, depth)
            self._spend(made)
            return made
        if type(found) is Pairs:
            return self._fill(self._register(found, {}), found, depth)
        if type(found) is list:
            made = self._register(found, [])
            made.extend(self.value(item, depth + 1) for item in found)
            return made
        if type(found) is tuple:
            return tuple(self.value(item, depth + 1) for item in found)
        return Placeholder("", f"a {type(found).__name__} in a pickle", TRUST)

    def _register(self, found: Any, made: Any) -> Any:
        self._kept.append(found)  # keeps its id from being used again
        self._built[id(found)] = made
        return made

    def _spend(self, *values: Any) -> None:
        # Lengths of copies count: a file of 1 MB can repeat one call a million times with 1 MB of text.
        self._left -= sum(
            value.nbytes if type(value) is np.ndarray else len(value)
            for value in values
            if isinstance(value, (*_SIZED, np.ndarray))
        )
        if self._left < 0:
            raise UnsupportedError(
                f"the calls in its pickle have arguments and values of more than {self._limit:,} elements",
                remedy="they have the same values many times: save each once",
            )

    def _fill(self, made: Any, pairs: Iterable[tuple[Any, Any]], depth: int) -> Any:
        pairs = list(pairs)
        taken = {key for key, _ in pairs if type(key) is str}
        # Equal keys overwrite each other, as in the dict that was pickled.
        for key, item in pairs:
            made[key if _is_key(key) else self._key(key, taken)] = self.value(item, depth + 1)
        return made

    def _key(self, found: Any, taken: set[str]) -> str:
        # A state cannot have such a key, for example a class. The text must not replace another key of the dict.
        text = base = _text(found)
        self._spend(base)
        while text in taken:
            # The number never starts again: a file can have the same key a million times.
            self._renamed += 1
            text = f"{base} {self._renamed}"
        taken.add(text)
        return text

    def _global(self, found: Global) -> Any:
        import torch

        # Not `getattr`: torch imports modules that are asked for.
        dtype = vars(torch).get(found.name) if found.module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        return str(found) if str(found) in _KNOWN or self._is_allowed(str(found)) else self._refused(str(found))

    def _is_allowed(self, name: str) -> bool:
        return name in self._allow or (self._script and name.startswith(_SCRIPT))

    def _refused(self, name: str) -> Placeholder:
        return Placeholder("", f"an object of {name}, which is not allowed", _allow_remedy([name]))

    def _reference(self, found: PersistentId) -> Any:
        key = found.key
        if type(key) is not tuple or len(key) < 2 or key[0] not in ("module", "storage"):
            raise ValueError("it refers to something that torch does not save")
        if key[0] == "module":
            return self.value(key[1])  # a class with its source, as torch wrote before version 1.6
        return Placeholder("", "a storage without a tensor", f"{_READ_WITH_TORCH} tensors")

    def call(self, call: Call, depth: int) -> Any:
        self._spend(call.args, *call.args, call.state, *(call.state if type(call.state) is tuple else ()))
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        if type(call.function) is not Global:
            return Placeholder("", f"what {_text(call.function)} returns", TRUST)
        name = str(call.function)
        # Arrays need a permission, as in ``torch.load(weights_only=True)``.
        if name in _NUMPY:
            return self._numpy(name, call, depth) if name in self._allow else self._refused(name)
        if name in _KNOWN:
            return _KNOWN[name](self, call, depth)
        return self._object(name, call, depth) if self._is_allowed(name) else self._refused(name)

    def _object(self, name: str, call: Call, depth: int) -> Any:
        # Subclasses of dict and list become plain ones, without their attributes.
        if call.pairs or call.items:
            self._leave_out([call.state])
        if call.pairs:
            return self._fill(self._register(call, {}), call.pairs, depth)
        if call.items:
            items = self._register(call, [])
            items.extend(self.value(item, depth + 1) for item in call.items)
            return items
        made: dict[str, Any] = self._register(call, {})
        # Without arguments, the attributes are the whole object: argparse.Namespace, most dataclasses.
        attributes = _attributes(call.state)
        if not call.args and attributes is not None:
            return self._fill(made, attributes, depth)
        made |= {"class": name, "arguments": [self.value(each, depth + 1) for each in call.args]}
        if call.state is not None:
            made["state"] = self.value(call.state, depth + 1)
        return made

    def _leave_out(self, states: Iterable[Any]) -> None:
        for state in states:
            found = _attributes(state) or []
            self._spend(found)
            self.attributes |= {key: None for key, _ in found if type(key) is str and not key.startswith("_")}

    def _reconstructed(self, call: Call, depth: int) -> Any:
        # Pickle protocols 0 and 1 make objects so.
        cls, _, start = call.args
        made = Call(cls, () if start is None else (start,))
        made.state, made.items, made.pairs = call.state, call.items, call.pairs
        return self.call(made, depth)

    def _ordered(self, call: Call, depth: int) -> Any:
        made = self._register(call, OrderedDict())
        # Each pair of the arguments is a list of two.
        given = ((key, item) for key, item in (call.args[0] if call.args else ()))
        self._fill(made, [*given, *call.pairs], depth)
        self._leave_out([call.state])
        for key, item in _attributes(call.state) or ():
            if key == "_metadata":
                made._metadata = self.value(item, depth + 1)
        return made

    def _set(self, call: Call, depth: int) -> Any:
        kind = frozenset if call.function.name == "frozenset" else set
        items = [*(call.args[0] if call.args else ()), *call.items]
        if not all(map(_is_key, items)):
            return Placeholder("", "a set of other than plain values", f"{_READ_WITH_TORCH} it as a list")
        return kind(items)

    def _function(self, call: Call, depth: int) -> Any:
        return Placeholder("", f"the function {_text(call)}", f"leave it out; {_READ_WITH_TORCH} its name")

    def _bytes(self, call: Call, depth: int) -> Any:
        # Pickle protocols 0 to 2 store bytes as text.
        text, encoding = call.args
        if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
            raise ValueError("bytes in another encoding than latin1")
        return text.encode(encoding)

    def _bytearray(self, call: Call, depth: int) -> Any:
        content = [self.value(each, depth + 1) for each in call.args]
        if not content or type(content[0]) is bytes:
            return bytearray(*content[:1])
        return bytearray(content[0].encode("latin-1"))

    # Arrays and scalars of numpy.

    def _numpy(self, name: str, call: Call, depth: int) -> Any:
        def value(found: Any) -> Any:
            is_type = type(found) is Global or (type(found) is Call and name_of(found.function) == "numpy.dtype")
            return found if is_type else self.value(found, depth + 1)

        args, kind = tuple(map(value, call.args)), name.rpartition(".")[2]
        if kind == "dtype":
            return Placeholder("", "a numpy dtype", "save its name")
        if kind == "ndarray":
            return Placeholder("", "an array that was made by a call", _PLAIN_ARRAYS)
        if kind == "scalar":
            found = _array(args[1], args[0], (1,), "C")
            if isinstance(found, Placeholder):
                return Placeholder("", "a numpy scalar that is not a number", _PLAIN_ARRAYS)
            return found[0]
        if kind == "_frombuffer":  # protocol 5
            content, dtype, shape, order = args
            return _array(content, dtype, shape, order)
        if name_of(args[0]) != "numpy.ndarray" or type(call.state) is not tuple:
            return Placeholder("", f"an array of the class {name_of(args[0]) or '...'}", "save np.asarray(x)")
        shape, dtype, is_fortran, content = map(value, call.state[-4:])
        return _array(content, dtype, shape, "F" if is_fortran else "C")

    # Tensors, which are views of storages of the file.

    def _storage(self, found: Any) -> "tuple[torch.UntypedStorage, torch.dtype]":
        import torch

        key = found.key if type(found) is PersistentId else None
        if type(key) is not tuple or len(key) not in (5, 6) or key[0] != "storage" or type(key[1]) is not Global:
            raise ValueError("a tensor has no storage")
        kind = key[1].name.rpartition(".")[2]
        dtype = torch.uint8 if kind == "UntypedStorage" else getattr(torch, STORAGES[kind])
        size = dtype.itemsize
        if type(key[2]) is not str:
            raise ValueError("a storage has no key")
        whole = self.storages(key[2], _count(key[4]) * size)
        if len(key) == 6 and key[5] is not None:
            # A view of another storage, as torch wrote before version 0.4.
            _, first, length = key[5]
            start = _count(first) * size
            whole = whole[start : start + _count(length) * size]
        return whole, dtype

    def _tensor(self, call: Call, depth: int) -> Any:
        import torch

        first, offset, size, stride, *rest = call.args
        strides = self.value(stride, depth + 1)
        if type(strides) is not tuple or any(_count(step) < 0 for step in strides):
            raise ValueError("a tensor has no strides")
        size = torch.Size(self.value(size, depth + 1))
        storage, dtype = self._storage(first)
        if call.function.name.endswith("v3"):
            dtype = self.value(rest.pop(2), depth + 1)
        if len(rest) > 3:
            raise ValueError("a tensor has more arguments than torch writes")
        # Torch checks that offset, size and strides stay inside the storage.
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, strides)
        tensor.requires_grad = bool(rest) and rest[0]
        # ``rest[1]`` are the hooks, which are functions. The last argument has the flags of lazy negation.
        for metadata in filter(None, [self.value(each, depth + 1) for each in rest[2:]]):
            cast(Any, torch)._utils.set_tensor_metadata(tensor, metadata)
        return tensor

    def _parameter(self, call: Call, depth: int) -> Any:
        import torch

        data = self.value(call.args[0], depth + 1)
        self._leave_out(call.args[3:])
        return torch.nn.Parameter(data, call.args[1]) if isinstance(data, torch.Tensor) else data

    def _tensor_of_type(self, call: Call, depth: int) -> Any:
        function, kind, arguments, state = call.args
        # A subclass that the caller allows becomes a plain tensor, or a dict if it wraps other tensors.
        name = name_of(kind)
        if not name:
            raise ValueError("a tensor has no class")
        if name not in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"):
            if not self._is_allowed(name):
                return self._refused(name)
            # A subclass that wraps other tensors has no elements itself: its attributes have the tensors.
            if function.name == "_rebuild_wrapper_subclass":
                made = Call(kind, ())
                made.state = state
                return self._register(call, self._object(name, made, depth))
        self._leave_out([state])
        return self.call(Call(function, arguments), depth + 1)

    def _tensor_on_device(self, call: Call, depth: int) -> Any:
        import torch

        # XLA and other devices save tensors so. Numpy has no bfloat16, so the array may have another dtype.
        data, dtype = self.value(call.args[0], depth + 1), self.value(call.args[1])
        if not isinstance(data, Placeholder) and not isinstance(data, torch.Tensor):
            data = torch.from_numpy(data)
        if isinstance(data, Placeholder) or data.dtype == dtype:
            return data
        return Placeholder("", f"a tensor of {dtype} that was saved as {data.dtype}", f"{_READ_WITH_TORCH} x.cpu()")


def _array(content: Any, kind: Any, shape: Any, order: Any) -> Any:
    """Return a numpy array; a `Placeholder` if its elements are not numbers."""
    dtype = _dtype(kind)
    if dtype is None:
        return Placeholder("", "an array of strings, objects, times or records", _PLAIN_ARRAYS)
    if type(content) is str:  # bytes of Python 2
        content = content.encode("utf-8", "surrogateescape")
    if type(content) not in (bytes, bytearray):
        raise ValueError("an array has no elements")
    # A copy, because memory of bytes is read-only.
    return np.frombuffer(content, dtype).astype(dtype.newbyteorder("=")).reshape(shape, order=order)


def _dtype(call: Any) -> np.dtype[Any] | None:
    if type(call) is not Call or name_of(call.function) != "numpy.dtype" or not call.args:
        raise ValueError("an array has no dtype")
    kind = call.args[0]
    if type(kind) is Global and kind.module == "ml_dtypes" and kind.name in BY_NAME:
        return BY_NAME[kind.name].numpy
    if type(kind) is not str or not re.fullmatch(r"[biufc]\d{1,2}|\?", kind):
        return None
    # The text is one letter and digits, so numpy cannot parse anything else from it.
    dtype: np.dtype[Any] = np.dtype(kind)
    # The byte order is in the state of the dtype, not in its text.
    is_big_endian = type(call.state) is tuple and len(call.state) > 1 and call.state[1] == ">"
    return dtype.newbyteorder(">") if is_big_endian else dtype


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**62:
        raise ValueError("an offset, length or stride is impossible")
    return found


def _attributes(state: Any) -> list[tuple[Any, Any]] | None:
    """Return the attributes in the state of an object, slots included; None if the state is another value."""
    # With slots, the state is a pair: the dict of the object, and the dict of its slots.
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if any(part is not None and type(part) is not Pairs for part in parts):
        return None
    return [pair for part in parts for pair in part or ()]


def _is_key(found: Any) -> bool:
    if type(found) is tuple:
        return all(type(part) in _SCALARS for part in found)
    return type(found) in _SCALARS and (type(found) is not str or found.isascii() or not _SURROGATES.search(found))


def _text(found: Any, depth: int = 0) -> str:
    if type(found) is str and depth == 0:
        return found.encode("utf-8", "backslashreplace").decode()
    if type(found) in (*_SCALARS, bytes):
        return ascii(found[:_MOST_LETTERS] if isinstance(found, str | bytes) else found)[:_MOST_LETTERS]
    # Errors show this text, and a hostile value may nest without end.
    if depth > 3 or type(found) not in (Call, tuple):
        return name_of(found) or "..."
    arguments = [_text(each, depth + 1) for each in (found if type(found) is tuple else found.args)[:_MOST_ARGUMENTS]]
    if type(found) is tuple:
        return f"({', '.join(arguments)})"
    function = name_of(found.function)
    if function == _GETATTR and len(found.args) == 2 and type(found.args[1]) is str:
        return f"{arguments[0]}.{found.args[1][:_MOST_LETTERS]}"
    if function == "_codecs.encode" and arguments and type(found.args[0]) is str:
        return f"b{arguments[0]}"
    return f"{_text(found.function, depth + 1)}({', '.join(arguments)})"


_Rebuild = Callable[[StateRebuilder, Call, int], Any]


def _with_values(make: Callable[..., Any]) -> _Rebuild:
    return lambda rebuilder, call, depth: make(*(rebuilder.value(each, depth + 1) for each in call.args))


def _of_torch(name: str) -> _Rebuild:
    def make(*values: Any) -> Any:
        import torch

        return getattr(torch, name)(*values)

    return _with_values(make)


def _unreadable(what: str, remedy: str) -> _Rebuild:
    return lambda rebuilder, call, depth: Placeholder("", what, f"{_READ_WITH_TORCH} {remedy}")


_UTILS = "torch._utils._rebuild"
# Classes and functions that are rebuilt without permission, by full name.
_KNOWN: dict[str, _Rebuild] = {
    "collections.OrderedDict": StateRebuilder._ordered,
    "collections.Counter": lambda rebuilder, call, depth: Counter(
        rebuilder._fill({}, [*(call.args[0] if call.args else ()), *call.pairs], depth)
    ),
    "builtins.set": StateRebuilder._set,
    "builtins.frozenset": StateRebuilder._set,
    "builtins.complex": _with_values(complex),
    "builtins.range": _with_values(range),
    "builtins.bytes": lambda rebuilder, call, depth: b"",
    "builtins.bytearray": StateRebuilder._bytearray,
    "_codecs.encode": StateRebuilder._bytes,
    _GETATTR: StateRebuilder._function,
    "copyreg._reconstructor": StateRebuilder._reconstructed,
    "torch.Size": _of_torch("Size"),
    "torch.device": _of_torch("device"),
    f"{_UTILS}_tensor": StateRebuilder._tensor,
    f"{_UTILS}_tensor_v2": StateRebuilder._tensor,
    f"{_UTILS}_tensor_v3": StateRebuilder._tensor,
    f"{_UTILS}_parameter": StateRebuilder._parameter,
    f"{_UTILS}_parameter_with_state": StateRebuilder._parameter,
    f"{_UTILS}_device_tensor_from_cpu_tensor": StateRebuilder._tensor_on_device,
    f"{_UTILS}_device_tensor_from_numpy": StateRebuilder._tensor_on_device,
    f"{_UTILS}_sparse_tensor": _unreadable("a sparse tensor", "x.to_dense(), or its indices and values"),
    f"{_UTILS}_qtensor": _unreadable("a quantised tensor", "x.int_repr() with its scale and zero point"),
    f"{_UTILS}_nested_tensor": _unreadable("a nested tensor", "x.unbind() as a list"),
    f"{_UTILS}_meta_tensor_no_storage": _unreadable("a tensor on the meta device, without data", "one with data"),
    f"{_UTILS}_wrapper_subclass": _unreadable("a tensor that wraps others", "the tensors that it consists of"),
    "torch._tensor._rebuild_from_type": StateRebuilder._tensor_of_type,
    "torch._tensor._rebuild_from_type_v2": StateRebuilder._tensor_of_type,
    "torch.serialization._get_layout": _unreadable("a torch.layout", "its name"),
    "torch.Tensor": _unreadable("a tensor of torch before version 0.4", "it again"),
    "torch._tensor.Tensor": _unreadable("a tensor of torch before version 0.4", "it again"),
    "torch.nn.parameter.Parameter": _unreadable("a parameter of torch before version 0.4", "it again"),
    **{
        f"torch.jit._pickle.{name}": _with_values(lambda values, *_: values)
        for name in ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")
    },
}
