"""Recorded pickles to states: tensors over the storages of a file, and plain values; nothing from the file is called.

What torch's restricted unpickler rebuilds is rebuilt here from its recorded arguments. An object of an allowed class
becomes a dict of its attributes. Every value that cannot be represented becomes a `Placeholder`, so that the others can
be read.
"""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorkeep.errors import UnsupportedError
from tensorkeep.formats.pickles.inert_pickle import Call, Global, Pairs, PersistentId, name_of
from tensorkeep.formats.pickles.numpy_arrays import NUMPY, REBUILD_NUMPY
from tensorkeep.formats.pickles.tensors import (
    READ_WITH_TORCH,
    TENSORS,
    Rebuild,
    Rebuilder,
    attributes_of,
    leave_attributes,
)
from tensorkeep.placeholder import Placeholder
from tensorkeep.state.skeleton_reader import MAX_DEPTH

if TYPE_CHECKING:
    from tensorkeep.formats.pickles.tensors import Storages

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
