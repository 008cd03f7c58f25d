"""`tensorkeep.info`: what a checkpoint contains, without reading a tensor; the report and its JSON."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from tensorkeep.checkpoint.options import AllowOption, open_settings
from tensorkeep.codecs import coder
from tensorkeep.errors import PathLike
from tensorkeep.formats.base import Entry, Reader
from tensorkeep.formats.finding import open_reader
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state.tree import placeholders, shown_values

# Programs in other languages read larger numbers in JSON as floats.
_SAFE_INTEGER = 2**53
_LONGEST_VALUE = 100


@dataclass(frozen=True, slots=True)
class Total:
    """Totals of some tensors: their number, elements, raw bytes and stored bytes."""

    tensors: int
    elements: int
    nbytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class InfoReport:
    """What a checkpoint contains; returned by `tensorkeep.info`.

    Attributes
    ----------
    path, format : str
    total : Total
    by_dtype, by_part, by_codec : dict of str to Total
        Tensors that share the storage of another one are counted in ``by_codec`` as ``alias``, with no bytes.
    entries : list of Entry
        Every tensor, in the state's order.
    metadata, details : dict
        What was given when it was saved, and what the format adds: version, writer, files... For a native checkpoint
        also the ``space`` that it takes on the disk; for an incremental one its ``history``: the bytes that its save
        wrote, and the bytes of the files that it shares with earlier ones; if many ranks saved it, its ``ranks`` and
        the ``layouts`` of sharded tensors.
    coder : str or None
        What decodes it on this machine, such as ``"compiled (avx2)"``; None if no tensor is stored as byte planes.
    placeholders : dict of str to str
        What each value is that cannot be read, by name; see `Placeholder`.
    values : dict of str to object
        The plain values of the state by name, such as ``step``. A list or tuple of plain values is one list.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> saved = tensorkeep.save({"model": {"w": torch.zeros(10, 10)}}, f"{folder.name}/c")
    >>> report = tensorkeep.info(saved.path)
    >>> report.largest(1)[0].name, {dtype: total.nbytes for dtype, total in report.by_dtype.items()}
    ('model.w', {'float32': 400})
    >>> folder.cleanup()
    """

    path: str
    format: str
    total: Total
    by_dtype: dict[str, Total]
    by_part: dict[str, Total]
    by_codec: dict[str, Total]
    entries: list[Entry]
    metadata: dict[str, Any]
    details: dict[str, Any]
    coder: str | None = None
    placeholders: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def largest(self, count: int) -> list[Entry]:
        """Return the largest tensors, largest first."""
        return sorted(self.entries, key=lambda entry: -entry.nbytes)[:count]

    def as_dict(self, *, largest: int = 10) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it, with the largest tensors instead of all."""
        return {
            **{key: value for key, value in asdict(replace(self, values={})).items() if key != "entries"},
            "values": {name: json_value(value) for name, value in self.values.items()},
            "largest": [describe(entry) for entry in self.largest(largest)],
        }


def json_value(value: Any) -> Any:
    """Return a plain value for a JSON document: itself, or a text if JSON does not have it."""
    if isinstance(value, list):
        return [json_value(each) for each in value]
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) < _SAFE_INTEGER
    return value if value is None or isinstance(value, str) or is_number else repr(value)


def outermost_first(values: Iterable[str]) -> list[str]:
    """Order names of values: the step and the settings of a run before the groups of its optimizer."""
    # Positions in a list do not count. A stable sort keeps the order of the state.
    return sorted(values, key=lambda name: sum(not part.isdecimal() for part in name.split(".")))


def value_text(value: Any) -> str:
    """Return a plain value on one line of at most 100 characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def describe(entry: Entry) -> dict[str, Any]:
    return {**msgspec.structs.asdict(entry), "dtype": entry.dtype.name, "shape": list(entry.shape)}


def info(path: PathLike, *, format: str | None = None, allow: AllowOption = None) -> InfoReport:
    """Return what a checkpoint of any format contains; no tensor is read.

    Parameters
    ----------
    path : path-like
        A checkpoint, or a step of a run such as ``"run"`` or ``"run@1200"``; see `tensorkeep.load`.
    format, allow : optional
        See `tensorkeep.load`.

    Raises
    ------
    NotFoundError, NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
        As `tensorkeep.load`; of the damage, only what its description shows.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = tensorkeep.save({"model": {"w": torch.zeros(10, 10)}}, f"{folder.name}/c")
    >>> found = tensorkeep.info(report.path)
    >>> found.total.tensors, found.total.elements, [entry.name for entry in found.entries]
    (1, 100, ['model.w'])
    >>> folder.cleanup()
    """
    path = checkpoint_path(path)
    with open_reader(path, open_settings(allow=allow), format) as reader:
        return report_of(path, reader)


def report_of(path: PathLike, reader: Reader) -> InfoReport:
    entries = list(reader.entries.values())
    return InfoReport(
        path=os.fspath(path),
        format=reader.format,
        total=total_of(entries),
        by_dtype=totals_by(entries, lambda entry: entry.dtype.name),
        by_part=totals_by(entries, lambda entry: entry.part),
        by_codec=totals_by(entries, lambda entry: entry.codec),
        entries=entries,
        metadata=reader.metadata,
        details=reader.details,
        coder=coder.describe() if any("planes" in entry.codec.split("+") for entry in entries) else None,
        placeholders={found.name: found.what for found in placeholders(reader.flat.skeleton)},
        values=dict(shown_values(reader.flat.skeleton)),
    )


def totals_by(entries: Iterable[Entry], key: Callable[[Entry], str]) -> dict[str, Total]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return {name: total_of(group) for name, group in groups.items()}


def total_of(entries: list[Entry]) -> Total:
    # A tensor that shares the storage of another one counts, but takes no bytes.
    own = [entry for entry in entries if entry.alias_of is None]
    return Total(
        tensors=len(entries),
        elements=sum(entry.nbytes // entry.dtype.itemsize for entry in own),
        nbytes=sum(entry.nbytes for entry in own),
        stored_bytes=sum(entry.stored_bytes for entry in own),
    )
