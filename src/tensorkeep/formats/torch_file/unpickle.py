"""Reading the pickle of a torch file without executing it, with a limit on the expanded size."""

import io
import json
import pickle
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.pickles import (
    NUMPY,
    READ_WITH_TORCH,
    REBUILD_NUMPY,
    STORAGES,
    TENSORS,
    Bounded,
    Call,
    Global,
    Pairs,
    PersistentId,
    Rebuild,
    Rebuilder,
    Recorder,
    attributes_of,
    leave_attributes,
    name_of,
)
from tensorkeep.formats.torch_file.zip_file import TorchZip
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.skeleton import MAX_DEPTH
from tensorkeep.storage.direct_io import Bytes

if TYPE_CHECKING:
    import torch

    from tensorkeep.formats.pickles import Storages


# Classes outside torch's allow list that the caller allows: read as dicts, never executed.
#
# A pickle names classes and functions, and calls them. All calls are only recorded (``inert_pickle.py``). An object
# of a
# class that is allowed becomes a dict (``rebuild.py``). The class itself is neither imported nor called, so that an
# allowed name cannot run code, whatever the file does with it.

COMMANDS = re.compile(
    r"(os|posix|nt|sys|subprocess|shutil|socket|runpy|importlib|ctypes|pty|code)(\..*)?"
    r"|builtins\.(eval|exec|compile|getattr|open|__import__)"
)
"""Names that run programs or code, which no checkpoint needs."""
Allow = str | type | Iterable[str | type]
"""Classes, or their full names."""


def allowed_names(allow: Allow | None) -> frozenset[str]:
    """Return the full names of the classes that a caller allows; UsageError if one is not the name of a class.

    "numpy" stands for all that rebuild arrays and scalars.

    >>> sorted(allowed_names(["argparse.Namespace", dict]))
    ['argparse.Namespace', 'builtins.dict']
    """
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
    return frozenset(names).union(NUMPY if "numpy" in names else ()) - {"numpy"}


# Files as torch wrote before version 1.6: pickles, followed by the storages of tensors, without checksums.

_MAGIC_NUMBER, _START_BYTES = 0x1950A86A20F9469CFC6C.to_bytes(10, "little"), 32
_VERSION = 1001
_COUNT_BYTES = 8


class OldFile:
    """The pickles of a file of ``size`` bytes, and where its storages are; like `TorchZip`, without its checks.

    Raises CorruptCheckpointError if they are malformed or the file is too short; UnsupportedError if it is another
    pickle, comes from a big-endian machine, or holds more than one save.
    """

    checksummed = is_script = False
    constants = 0

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._size = size
        self.storages: set[tuple[int, int]] = set()
        self._counts: dict[str, int] = {}
        file.seek(0)
        recorder = Recorder(Bounded(file, size))
        try:
            first = file.read(_START_BYTES)
            if _MAGIC_NUMBER not in first and (size > _START_BYTES or first.endswith(pickle.STOP)):
                raise UnsupportedError(
                    "is a bare Python pickle, which torch.save did not write; loading it could run any code",
                    path=path,
                    remedy="if you trust it, load it with pickle, and save tensors and plain values",
                )
            file.seek(0)
            recorder.load()
            if recorder.load() != _VERSION:
                text = f"is of another version of torch's old format than {_VERSION}"
                raise UnsupportedError(text, path=path, remedy=f"{READ_WITH_TORCH} it again")
            system = recorder.load()
            if type(system) is Pairs and any(pair == ("little_endian", False) for pair in system):
                remedy = "save it again on a little-endian one"
                raise UnsupportedError("comes from a big-endian machine", path=path, remedy=remedy)
            recorder.globals.clear()
            self._state, self._recorder = recorder.load(), recorder
            keys = recorder.load()
            self.pickle_bytes = start = file.tell()
            self._starts = self._find_storages(keys, start)
            file.seek(self._stop)
            if rest := file.read(1):
                what = "another save" if rest == pickle.PROTO else "what no tensor uses"
                raise UnsupportedError(
                    f"holds {what} after the first save, {size - self._stop:,} bytes",
                    path=path,
                    remedy="save each value to a file of its own, or all in one dict",
                )
        except ValueError as error:
            if isinstance(error, UnsupportedError):
                raise
            raise CorruptCheckpointError(f"its pickle is damaged ({error})", path=path) from error

    def _find_storages(self, keys: Any, start: int) -> dict[str, int]:
        """Return where each storage begins: one lies behind the other, each with its number of elements before it."""
        sizes: dict[str, int] = {}
        for found in self._recorder.references:
            if type(found) is tuple and len(found) == 6 and found[0] == "storage" and type(found[1]) is Global:
                kind, key, _, count = found[1:5]
                dtype = BY_NAME.get(STORAGES.get(kind.name, ""))
                if type(count) is int and count >= 0 and type(key) is str:
                    self._counts[key] = count
                    sizes[key] = count * (dtype.itemsize if dtype else _QUANTISED.get(kind.name, 1))
        starts = {}
        for key in keys if type(keys) is list else ():
            if type(key) is not str or key not in sizes:
                raise ValueError("a storage belongs to no tensor")
            starts[key] = start + _COUNT_BYTES
            start += _COUNT_BYTES + sizes[key]
        if start > self._size:
            raise ValueError(f"its storages need {start:,} bytes, the file has {self._size:,}")
        self._stop = start
        return starts

    def pickled(self) -> tuple[Any, Recorder]:
        """Return what the pickle records, and the recorder."""
        return self._state, self._recorder

    def storage_at(self, key: str, content: Bytes) -> int:
        """Return where in the file a storage begins; ValueError if it does not exist, or is not as the pickle says."""
        if key not in self._starts:
            raise ValueError(f"it has no storage {key!r:.50}")
        start = self._starts[key]
        if int.from_bytes(content[start - _COUNT_BYTES : start].tobytes(), "little") != self._counts[key]:
            raise ValueError(f"the storage {key!r:.50} has another length than the pickle says")
        return start

    def local_headers(self) -> list[tuple[int, int]]:
        """Return where in the file the count before each storage is."""
        return [(start - _COUNT_BYTES, start) for start in self._starts.values()]


_QUANTISED = {"QInt32Storage": 4}
"""Bytes an element of storages of quantised tensors; the others have one."""


# Recorded pickles to states: tensors over the storages of a file, and plain values; nothing from the file is
# called.
#
# What torch's restricted unpickler rebuilds is rebuilt here from its recorded arguments. An object of an allowed class
# becomes a dict of its attributes. Every value that cannot be represented becomes a `Placeholder`, so that the
# others can
# be read.

TRUST = "if you trust it, load it with torch.load(weights_only=False) and save tensors and plain values"
SCRIPT = "__torch__."
"""The names of all classes of a TorchScript archive begin so."""
_GETATTR = "builtins.getattr"
_SURROGATES = re.compile("[\ud800-\udfff]")
_MOST_LETTERS, _MOST_ARGUMENTS = 200, 4
_SCALARS = (type(None), bool, int, float, str)
_TOO_DEEP = Placeholder("", f"nested deeper than {MAX_DEPTH} levels", TRUST)
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)


class StateRebuilder:
    """Rebuilds the state of one pickle.

    ``allow`` has the names of the classes whose objects become dicts; with ``script`` also those of a TorchScript
    archive do. ``attributes`` are names of attributes of tensors and dicts that the state does not have. The arguments
    and values of all calls may have ``limit`` elements or bytes in all.
    """

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
        key = id(found)  # what was recorded is kept until all of it is rebuilt
        if key in self._built:
            return self._built[key]
        if key in self._open:
            return Placeholder("", "a value that is made from itself", TRUST)
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        self._open.add(key)
        self._built[key] = made = self._make(found, depth)
        self._open.discard(key)
        return made

    def _make(self, found: Any, depth: int) -> Any:
        if type(found) is Call:
            made = self.call(found, depth)
            self.spend(made)
            return made
        if type(found) is Pairs:
            return self._fill(self.container(found, {}), found, depth)
        if type(found) is list:
            made = self.container(found, [])
            made.extend(self.value(item, depth + 1) for item in found)
            return made
        if type(found) is tuple:
            return tuple(self.value(item, depth + 1) for item in found)
        return Placeholder("", f"a {type(found).__name__} in a pickle", TRUST)

    def container(self, found: Any, made: Any) -> Any:
        """Let values inside of a container refer to it."""
        self._kept.append(found)  # no other may get its id
        self._built[id(found)] = made
        return made

    def spend(self, *values: Any) -> None:
        """Count the lengths of what is copied: a file of 1 MB can have one call a million times, with 1 MB of text."""
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
        for key, item in pairs:
            made[key if _is_key(key) else self._key(key, taken)] = self.value(item, depth + 1)
        return made

    def _key(self, found: Any, taken: set[str]) -> str:
        """Return what no key of a state can be as a text that no other key is: a class as its name."""
        text = base = _text(found)
        self.spend(base)
        while text in taken:
            self._renamed += 1  # never begins again: a file can have the same key a million times
            text = f"{base} {self._renamed}"
        taken.add(text)
        return text

    def _global(self, found: Global) -> Any:
        import torch

        # Not `getattr`: torch imports modules that are asked for.
        dtype = vars(torch).get(found.name) if found.module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        return str(found) if str(found) in _KNOWN or self.is_allowed(str(found)) else self.refused(str(found))

    def is_allowed(self, name: str) -> bool:
        return name in self._allow or (self._script and name.startswith(SCRIPT))

    def refused(self, name: str) -> Placeholder:
        return Placeholder("", f"an object of {name}, which is not allowed", allow_remedy([name]))

    def _reference(self, found: PersistentId) -> Any:
        key = found.key
        if type(key) is not tuple or len(key) < 2 or key[0] not in ("module", "storage"):
            raise ValueError("it refers to something that torch does not save")
        if key[0] == "module":
            return self.value(key[1])  # a class with its source, as torch wrote before version 1.6
        return Placeholder("", "a storage without a tensor", f"{READ_WITH_TORCH} tensors")

    def call(self, call: Call, depth: int) -> Any:
        self.spend(call.args, *call.args, call.state, *(call.state if type(call.state) is tuple else ()))
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        if type(call.function) is not Global:
            return Placeholder("", f"what {_text(call.function)} returns", TRUST)
        name = str(call.function)
        if name in NUMPY:
            return self.refused(name) if name not in self._allow else self._numpy(name, call, depth)
        if name in _KNOWN:
            return _KNOWN[name](self, call, depth)
        return self.object(name, call, depth) if self.is_allowed(name) else self.refused(name)

    def object(self, name: str, call: Call, depth: int) -> Any:
        """Return an object as a dict: of its items, of its attributes, or of its class and how it is made."""
        if call.pairs or call.items:
            leave_attributes(self, [call.state])
        if call.pairs:
            return self._fill(self.container(call, {}), call.pairs, depth)
        if call.items:
            items = self.container(call, [])
            items.extend(self.value(item, depth + 1) for item in call.items)
            return items
        made: dict[str, Any] = self.container(call, {})
        attributes = attributes_of(call.state)
        if not call.args and attributes is not None:
            return self._fill(made, attributes, depth)
        made |= {"class": name, "arguments": [self.value(each, depth + 1) for each in call.args]}
        if call.state is not None:
            made["state"] = self.value(call.state, depth + 1)
        return made

    def _reconstructed(self, call: Call, depth: int) -> Any:
        """Return an object as the older protocols of pickle make it."""
        cls, _, start = call.args
        made = Call(cls, () if start is None else (start,))
        made.state, made.items, made.pairs = call.state, call.items, call.pairs
        return self.call(made, depth)

    def _numpy(self, name: str, call: Call, depth: int) -> Any:
        def value(found: Any) -> Any:
            is_type = type(found) is Global or (type(found) is Call and name_of(found.function) == "numpy.dtype")
            return found if is_type else self.value(found, depth + 1)

        made = Call(call.function, tuple(map(value, call.args)))
        made.state = tuple(map(value, call.state)) if type(call.state) is tuple else None
        return REBUILD_NUMPY[name.rpartition(".")[2]](made)

    def _ordered(self, call: Call, depth: int) -> Any:
        made = self.container(call, OrderedDict())
        # Each pair of the arguments is a list.
        given = ((key, item) for key, item in (call.args[0] if call.args else ()))
        self._fill(made, [*given, *call.pairs], depth)
        leave_attributes(self, [call.state])
        for key, item in attributes_of(call.state) or ():
            if key == "_metadata":
                made._metadata = self.value(item, depth + 1)
        return made

    def _counter(self, call: Call, depth: int) -> Any:
        return Counter(self._fill({}, [*(call.args[0] if call.args else ()), *call.pairs], depth))

    def _set(self, call: Call, depth: int) -> Any:
        kind = frozenset if call.function.name == "frozenset" else set
        items = [*(call.args[0] if call.args else ()), *call.items]
        if not all(map(_is_key, items)):
            return Placeholder("", "a set of other than plain values", f"{READ_WITH_TORCH} it as a list")
        return kind(items)

    def _function(self, call: Call, depth: int) -> Any:
        return Placeholder("", f"the function {_text(call)}", f"leave it out; {READ_WITH_TORCH} its name")


def allow_remedy(names: Iterable[str]) -> str:
    """Return the remedy for objects of classes that are not allowed."""
    short = dict.fromkeys("numpy" if name in NUMPY else name for name in names if name != _GETATTR)
    listed = json.dumps([*short], ensure_ascii=False)
    return f"to read such objects as dicts, without running their code: allow={listed}"


def is_known(name: str) -> bool:
    """Return whether values of a class, or of a function, are read without permission."""
    import torch

    module, _, own = name.rpartition(".")
    if module in ("torch", "torch.storage", "torch.cuda") and own.endswith("Storage"):
        return True
    return name in _KNOWN or (module == "torch" and isinstance(vars(torch).get(own), (torch.dtype, torch.qscheme)))


def _is_key(found: Any) -> bool:
    """Return whether a recorded value is a key that a state can have."""
    if type(found) is tuple:
        return all(type(part) in _SCALARS for part in found)
    return type(found) in _SCALARS and (type(found) is not str or found.isascii() or not _SURROGATES.search(found))


def _text(found: Any, depth: int = 0) -> str:
    """Return a recorded value as text, abbreviated."""
    if type(found) is str and depth == 0:
        return found.encode("utf-8", "backslashreplace").decode()
    if type(found) in (*_SCALARS, bytes):
        return ascii(found[:_MOST_LETTERS] if isinstance(found, str | bytes) else found)[:_MOST_LETTERS]
    if depth > 3 or type(found) not in (Call, tuple):
        return name_of(found) or "..."
    arguments = [_text(each, depth + 1) for each in (found if type(found) is tuple else found.args)[:_MOST_ARGUMENTS]]
    if type(found) is tuple:
        return f"({', '.join(arguments)})"
    function = name_of(found.function)
    if function == _GETATTR and len(found.args) == 2 and type(found.args[1]) is str:
        return f"{arguments[0]}.{found.args[1][:_MOST_LETTERS]}"
    if function == "_codecs.encode" and arguments and type(found.args[0]) is str:
        return f"b{arguments[0]}"  # bytes, as the older protocols of pickle write them
    return f"{_text(found.function, depth + 1)}({', '.join(arguments)})"


def _encoded(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    text, encoding = call.args
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError("bytes in another encoding than latin1")
    return text.encode(encoding)


def _bytearray(rebuilder: Rebuilder, call: Call, depth: int) -> Any:
    content = [rebuilder.value(each, depth + 1) for each in call.args]
    if not content or type(content[0]) is bytes:
        return bytearray(*content[:1])
    return bytearray(content[0].encode("latin-1"))


def _plain(make: Callable[..., Any]) -> Rebuild:
    return lambda rebuilder, call, depth: make(*(rebuilder.value(each, depth + 1) for each in call.args))


def _size(*lengths: Any) -> Any:
    import torch

    return torch.Size(*lengths)


def _device(*arguments: Any) -> Any:
    import torch

    return torch.device(*arguments)


_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": StateRebuilder._ordered,
    "collections.Counter": StateRebuilder._counter,
    "builtins.set": StateRebuilder._set,
    "builtins.frozenset": StateRebuilder._set,
    "builtins.complex": _plain(complex),
    "builtins.range": _plain(range),
    "builtins.bytes": lambda rebuilder, call, depth: b"",
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _encoded,
    _GETATTR: StateRebuilder._function,
    "copyreg._reconstructor": StateRebuilder._reconstructed,
    "torch.Size": _plain(_size),
    "torch.device": _plain(_device),
    **TENSORS,
    **{
        f"torch.jit._pickle.{name}": _plain(lambda values, *_: values)
        for name in ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")
    },
}
"""What is rebuilt without permission, by its full name."""


SHARED_VALUES = 1_000_000
"""Values that containers may add by containing one another; see `count_values`."""


class Unpickled(NamedTuple):
    """The state of a torch file.

    ``refusal`` is the error for a load that does not leave out the objects of classes that are not allowed; None if the
    file has none. ``attributes`` are the names of attributes of tensors and dicts that the state does not have, and
    ``others`` the number of values of a TorchScript archive that are no tensors. ``storages`` are the keys of the
    storages of tensors in the state.
    """

    state: Any
    refusal: UnsupportedError | None
    attributes: list[str]
    storages: frozenset[str]
    others: int = 0


def restricted_load(file: io.BytesIO) -> Any:
    """Return what torch's restricted unpickler reads from a file; raises the errors of torch, of almost any type."""
    import torch

    with warnings.catch_warnings():
        # Torch warns about some exotic dtypes.
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(file, map_location="cpu", weights_only=True)


def load_untrusted(whole: Any, archive: TorchZip | OldFile, path: Path, allow: Collection[str] = ()) -> Unpickled:
    """Return the state of a file, whose tensors lie in ``whole``, the content of the file; nothing in it is executed.

    Raises UnsupportedError if it names what runs programs or code, or has an opcode that is not known;
    CorruptCheckpointError if it is damaged; OutOfMemoryError if there is not enough memory.
    """
    import torch

    content = torch.empty(0, dtype=torch.uint8).set_(whole).numpy()

    used: set[str] = set()

    def storage(key: str, nbytes: int) -> Any:
        used.add(key)
        start = archive.storage_at(key, content)
        return whole[start : start + nbytes]

    try:
        found, recorder = archive.pickled()
    except ValueError as error:
        if archive.checksummed:
            # Its CRC-32 is right, so the pickle is not damaged.
            raise UnsupportedError(f"its pickle cannot be decoded ({error})", path=path, remedy=TRUST) from error
        raise CorruptCheckpointError(f"its pickle is damaged ({error})", path=path) from error
    names = [name for name in recorder.globals if not is_known(name) and name not in allow]
    names = sorted(name for name in names if not (archive.is_script and name.startswith(SCRIPT)))
    refusal = _refusal(path, names) if names else None
    if refusal is not None and any(COMMANDS.fullmatch(name) for name in names):
        raise refusal
    rebuilder = StateRebuilder(storage, allow, SHARED_VALUES + 16 * archive.pickle_bytes, script=archive.is_script)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
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


def storage_of(content: np.ndarray[Any, Any]) -> "torch.UntypedStorage":
    """Return a copy of some bytes as a storage."""
    import torch

    return torch.from_numpy(np.array(content)).untyped_storage()


def _collect_tensors(value: Any, name: str, found: dict[str, Any], inside: set[int]) -> int:
    """Put the tensors of a module's attributes under their dotted names; return the number of other values."""
    import torch

    if isinstance(value, torch.Tensor | Placeholder):
        # As in a state dict.
        found[name] = value.detach() if isinstance(value, torch.Tensor) else value
        return 0
    if not isinstance(value, dict | list | tuple) or id(value) in inside:
        return 1
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inside.add(id(value))
    others = sum(_collect_tensors(item, f"{name}.{key}" if name else str(key), found, inside) for key, item in items)
    inside.remove(id(value))
    return others


def _refusal(path: Path, names: list[str]) -> UnsupportedError:
    commands = [name for name in names if COMMANDS.fullmatch(name)]
    calls = f"its pickle calls {', '.join(names)}: loading it would run code from the file"
    remedy = f'to read all else, select="*"; {allow_remedy(names)}'
    if commands:
        remedy = f"do not load it elsewhere: a checkpoint has no use for {commands[0]}, which runs code"
    return UnsupportedError(calls, path=path, remedy=remedy)


def count_values(state: object, limit: int) -> int:
    """Return the number of items in all containers of a state, counted as often as they are reached.

    A pickle of 60 lists, each of which contains the next one twice, has 2**60 items. A container inside of itself
    counts once.

    Raises UnsupportedError if there are more than the limit.

    Examples
    --------
    >>> count_values({"a": [1, 2]}, 10)
    5
    """
    count = 0
    around: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(state, True)]
    while waiting:
        value, enters = waiting.pop()
        if not enters:
            around.remove(id(value))
        elif isinstance(value, dict | list | tuple | set) and id(value) not in around:
            count += 1 + len(value)
            if count > limit:
                raise UnsupportedError(
                    f"its pickle expands to more than {limit:,} values",
                    remedy="its containers contain one another many times: save each once",
                )
            around.add(id(value))
            waiting.append((value, False))
            waiting.extend((item, True) for item in (value.values() if isinstance(value, dict) else value))
    return count
