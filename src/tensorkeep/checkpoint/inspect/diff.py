"""`tensorkeep.diff`: compare two checkpoints of any formats, tensor by tensor."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, thread_count
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.checkpoint.inspect.comparing import TensorDiff, compare, together
from tensorkeep.checkpoint.inspect.distances import Tolerance
from tensorkeep.checkpoint.manager.address import checkpoint_path
from tensorkeep.checkpoint.progress import ProgressOption, drawn
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import Entry, OpenSettings, Reader
from tensorkeep.formats.torch_file.allowed import Allow, allowed_names
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.state import names
from tensorkeep.state.tree import PlainValue, plain_values, unflatten

_SAFE_INTEGER = 2**53
"""Programs in other languages read larger numbers in JSON as floats."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A shape, dtype or plain value that is not the same in both checkpoints."""

    name: str
    a: Any
    b: Any

    @property
    def texts(self) -> tuple[str, str]:
        """Both values as texts, ``absent`` for one that a checkpoint does not have."""
        texts = _text(self.a), _text(self.b)
        # The text "1" and the number 1.
        return texts if texts[0] != texts[1] else (_text(self.a, repr), _text(self.b, repr))

    def as_dict(self) -> dict[str, Any]:
        """Return the mismatch as plain values; a value that JSON does not have is a text."""
        return {"name": self.name, "a": _json(self.a), "b": _json(self.b)}


def _text(value: Any, write: Callable[[Any], str] = str) -> str:
    if value is None:
        return "absent"
    return write(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ; ``bool(report)`` is its ``equal``, so true if they do not.

    Attributes
    ----------
    a, b : str
        The paths.
    equal : bool
        Whether nothing differs beyond the tolerance.
    added, removed : list of str
        Tensors that only ``b``, or only ``a``, has.
    reshaped, retyped : list of Mismatch
        Tensors of another shape, or of the same shape and another dtype.
    changed, identical : list of TensorDiff, int
        Tensors with other values, the largest relative L2 difference first and integers last, and how many are the
        same, within the tolerance.
    values : list of Mismatch
        Plain values that differ in type or in a bit, as they are in the state (an enum by its name); None if a
        checkpoint does not have it, and ``"None"`` for a None that was saved. For containers or tensors of different
        kinds (a list and a tuple, a tensor and an array), their kinds. An OrderedDict counts as a dict, a parameter as
        a tensor.
    converted : list of TensorDiff
        The values of the tensors in ``retyped``, compared as numbers.
    placeholders : list of str
        Values that cannot be read from one of the checkpoints, or both (see `Placeholder`). They are not compared, and
        so count as a difference; with ``select`` they are left out.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name, value in (("a", 0.0), ("b", 0.5)):
    ...     _ = tensorkeep.save({"model": {"w": torch.full((4,), value)}}, f"{folder.name}/{name}")
    >>> report = tensorkeep.diff(f"{folder.name}/a", f"{folder.name}/b")
    >>> bool(report), report.total.different, [layer.name for layer in report.by_layer()]
    (False, 4, ['model'])
    >>> folder.cleanup()
    """

    a: str
    b: str
    equal: bool
    added: list[str]
    removed: list[str]
    reshaped: list[Mismatch]
    retyped: list[Mismatch]
    changed: list[TensorDiff]
    identical: int
    values: list[Mismatch]
    converted: list[TensorDiff] = field(default_factory=list)
    placeholders: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.equal

    def as_dict(self, *, depth: int | None = None) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it, with the layers of `by_layer`."""
        return {
            **asdict(self),
            "values": [found.as_dict() for found in self.values],
            "changed": [found.as_dict() for found in self.changed],
            "converted": [found.as_dict() for found in self.converted],
            "total": self.total.as_dict(),
            "layers": [found.as_dict() for found in self.by_layer(depth)],
        }

    @property
    def total(self) -> TensorDiff:
        """How the changed tensors differ together; distances are those of floating point tensors, if there are any."""
        return together("", self.changed)

    @property
    def summary(self) -> str:
        """How many tensors are changed, reshaped, of another dtype, added, removed and identical, as text."""
        counts = (
            (len(self.changed), "changed"),
            (len(self.reshaped), "reshaped"),
            (len(self.retyped), "of another dtype"),
            (len(self.added), "added"),
            (len(self.removed), "removed"),
            (self.identical, "identical"),
        )
        return ", ".join(f"{count:,} {what}" for count, what in counts if count) or "no tensors"

    def by_layer(self, depth: int | None = None) -> list[TensorDiff]:
        """Return how the changed tensors of each layer differ together, in the order of ``changed``; see `total`.

        A layer is named by the first ``depth`` components of the names of its tensors: by default up to the first
        number (``model.blocks.3``), or without a number by all but the last component (``model.head``).
        """
        layers: dict[str, list[TensorDiff]] = {}
        for found in self.changed:
            layers.setdefault(layer_of(found.name, depth), []).append(found)
        return sorted((together(name, found) for name, found in layers.items()), key=_most_changed_first)


def diff(
    a: PathLike,
    b: PathLike,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    select: str | Iterable[str] | None = None,
    verify: bool = True,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    allow: Allow | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats; tensors are matched by name.

    Tensors whose bits are equal are not computed with. Tensors of different dtypes differ, and their values are
    compared as numbers.

    Parameters
    ----------
    a, b : path-like
        Checkpoints, or steps of runs such as ``"run"`` or ``"run@1200"``; see `tensorkeep.load`.
    atol, rtol : float
        Elements are the same when ``|a - b| <= atol + rtol * |b|``. With both 0 their bits are compared, so that a NaN
        equals itself and -0.0 differs from 0.0.
    select : str or list of str, optional
        Globs on the names; only these tensors are compared, and no plain values.
    verify : bool
        Check every block that is read against its checksum, where the format has any.
    progress : bool or callable, optional
        True draws a bar on stderr if that is a terminal. A function is called with (bytes done, bytes in all), from
        the reading threads, one call at a time.
    threads : int, optional
        Reading threads; twice the cores, between 2 and 8, by default.
    memory_budget : int or str
        Limit in bytes for all buffers together, also as ``"256MiB"``. For a view that is not contiguous, such as a
        transposed tensor, the full stored tensor is loaded in addition, unless both checkpoints have the same view.
    allow : str, class, or list of them, optional
        Classes outside torch's allow list, such as ``"argparse.Namespace"``, whose objects in ``torch.save`` files are
        read as dicts; their code is not run.

    Raises
    ------
    NotFoundError, NotACheckpointError, UsageError
        If nothing is at a path, or not a checkpoint; if a tolerance is not valid, or a pattern matches nothing.
    CorruptCheckpointError, UnsupportedError, StoreError
        If a block that is read is damaged, a checkpoint cannot be read by this installation, or the disk failed.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> for name, value in (("a", 0.0), ("b", 0.5)):
    ...     _ = tensorkeep.save({"w": torch.full((4,), value), "step": 1}, f"{folder.name}/{name}")
    >>> report = tensorkeep.diff(f"{folder.name}/a", f"{folder.name}/b")
    >>> report.equal, [(found.name, found.different, found.largest) for found in report.changed]
    (False, [('w', 4, 0.5)])
    >>> tensorkeep.diff(f"{folder.name}/a", f"{folder.name}/b", atol=0.5).equal
    True
    >>> folder.cleanup()
    """
    for value in (atol, rtol):
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"a tolerance of {value} is not allowed", remedy="give a finite number of 0 or more")
    count = thread_count(threads)
    settings = OpenSettings(verify=verify, pool=budget_pool(memory_budget), allow=allowed_names(allow))
    a, b = checkpoint_path(a), checkpoint_path(b)
    with (
        settings.pool as pool,
        open_reader(a, settings) as left,
        open_reader(b, settings) as right,
        drawn(progress, "comparing") as callback,
    ):
        both = dict.fromkeys([*left.entries, *right.entries])
        chosen = both.keys() if select is None else set(names.select(both, select))
        common = [name for name in left.entries if name in right.entries and name in chosen]
        reshaped, common = _mismatches(left, right, common, lambda entry: list(entry.shape))
        retyped, _ = _mismatches(left, right, common, lambda entry: entry.dtype.name)
        other_types = {mismatch.name for mismatch in retyped}
        compared = compare(left, right, common, Tolerance(atol, rtol), count, pool, callback)
        found = [each for each in compared if each.name not in other_types]
        converted = sorted((each for each in compared if each.name in other_types), key=_most_changed_first)
        changed = sorted((each for each in found if each.different), key=_most_changed_first)
        values, placeholders = _values(left, right) if select is None else ([], [])
        added = [name for name in right.entries if name in chosen and name not in left.entries]
        removed = [name for name in left.entries if name in chosen and name not in right.entries]
        equal = not (added or removed or reshaped or retyped or changed or values or placeholders)
        identical = len(found) - len(changed)
        a, b = os.fspath(a), os.fspath(b)
        return DiffReport(
            *(a, b, equal, added, removed, reshaped, retyped, changed, identical, values, converted, placeholders)
        )


def _most_changed_first(found: TensorDiff) -> tuple[bool, float, float, str]:
    return not found.floating, -found.relative_l2, -found.share, found.name


def layer_of(name: str, depth: int | None = None) -> str:
    """Return the layer that a tensor belongs to; see `DiffReport.by_layer`."""
    parts = name.split(".")
    if depth is None:
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        depth = max(len(parts) - 1, 1) if number is None else number + 1
    return ".".join(parts[:depth])


def _mismatches(
    left: Reader, right: Reader, common: list[str], key: Callable[[Entry], object]
) -> tuple[list[Mismatch], list[str]]:
    """Return the tensors whose shapes or dtypes differ, and the names of the others."""
    found = [Mismatch(name, key(left.entries[name]), key(right.entries[name])) for name in common]
    return [each for each in found if each.a != each.b], [each.name for each in found if each.a == each.b]


def _values(left: Reader, right: Reader) -> tuple[list[Mismatch], list[str]]:
    """Return the plain values that differ, and the names of those that cannot be read."""
    first, second = plain_values(left.flat.skeleton), plain_values(right.flat.skeleton)
    found, unread = [], []
    for path in dict.fromkeys([*first, *second]):
        a, b = first.get(path), second.get(path)
        if "placeholder" in (a and a.kind, b and b.kind):
            unread.append((a or b).name)  # type: ignore[union-attr]  # one of them exists
        elif a and b:
            if not a.equals(b):
                found.append(Mismatch(a.name, _value(a), _value(b)))
        elif a and a.is_content:
            found.append(Mismatch(a.name, _value(a), None))
        elif b and b.is_content:
            found.append(Mismatch(b.name, None, _value(b)))
    return found, unread


def _value(found: PlainValue) -> Any:
    """Return a value as the state has it; a None that was saved as a text, because None stands for no value."""
    if found.node is None:
        return "None"
    if found.kind != "plain" or not isinstance(found.node, dict):
        return found.node
    if "enum" in found.node:
        name, member = found.node["enum"]
        return f"{name.replace(':', '.')}.{member}"
    return unflatten(found.node, {})


def _json(value: Any) -> Any:
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) < _SAFE_INTEGER
    return value if value is None or isinstance(value, str | list) or is_number else repr(value)
