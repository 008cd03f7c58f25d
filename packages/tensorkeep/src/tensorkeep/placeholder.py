"""A stand-in for a value of a checkpoint that cannot be read."""

from collections.abc import Callable
from typing import Any, NoReturn

from tensorkeep.errors import UnsupportedError


class Placeholder:
    """A value of a checkpoint that cannot be read; everything around it is loaded as usual.

    It stands for an object of a class that is not allowed, a reference of a container to itself, a function, a sparse,
    quantised, nested or meta tensor, an array of strings, a tensor of a dtype that neither torch nor numpy has, and the
    like. `tensorkeep.info` and ``tensorkeep ls`` list it, `tensorkeep.load` warns about it, and ``select`` leaves it
    out.

    A placeholder has only ``name``, ``what``, ``remedy``, ``repr()``, ``str()``, ``isinstance()``, ``is``, copies and
    pickles. All other operations raise UnsupportedError: attributes, items, ``len()``, ``in``, iteration, truth, a
    call, comparisons, arithmetic, and conversions to a number, an index or bytes. `tensorkeep.save` and
    `tensorkeep.convert` refuse it.

    Attributes
    ----------
    name : str
        The dotted name in the state.
    what : str
        What the value is, and why it cannot be read.
    remedy : str
        What to do.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep, warnings
    >>> folder = tempfile.TemporaryDirectory()
    >>> torch.save({"w": torch.ones(2), "mask": torch.eye(2).to_sparse()}, f"{folder.name}/a.pt")
    >>> with warnings.catch_warnings(action="ignore"):
    ...     state = tensorkeep.load(f"{folder.name}/a.pt")
    >>> state["w"], isinstance(state["mask"], tensorkeep.Placeholder)
    (tensor([1., 1.]), True)
    >>> tensorkeep.load(f"{folder.name}/a.pt", select="*")
    {'w': tensor([1., 1.])}
    >>> folder.cleanup()
    """

    __slots__ = ("name", "remedy", "what")

    def __init__(self, name: str, what: str, remedy: str) -> None:
        self.name = name
        self.what = what
        self.remedy = remedy

    def __repr__(self) -> str:
        return f"<Placeholder {self.name!r}: {self.what}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Placeholder, (self.name, self.what, self.remedy)

    def __getattr__(self, attribute: str) -> Any:
        # copy, numpy and pickle look for protocols by name; a protocol must be absent, and not raise.
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        self._raise()

    __hash__ = object.__hash__

    def _raise(self) -> NoReturn:
        raise UnsupportedError(f"cannot be read: {self.what}", name=self.name, remedy=self.remedy or None)


_OPERATIONS = """
getitem setitem delitem len contains iter next bool call eq ne lt le gt ge int float complex index bytes
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
and rand or ror xor rxor lshift rshift neg pos abs invert round array enter exit
"""


def _refusing(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: Placeholder, *_: Any, **__: Any) -> NoReturn:
        self._raise()

    refuse.__name__ = refuse.__qualname__ = operation
    return refuse


for _operation in _OPERATIONS.split():
    setattr(Placeholder, f"__{_operation}__", _refusing(f"__{_operation}__"))
