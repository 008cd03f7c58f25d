"""Texts of tables: one column of a parquet or Arrow file, read by pyarrow a few rows at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from tensorkeep.errors import OutOfMemoryError, UsageError, first_line, import_extra
from tensorkeep.storage.direct_io import store_error
from tensorkeep.train.data.corpus import TextFile

_ROWS_AT_ONCE = 256
_READ_AT_ONCE = 1 << 20
"""Bytes of a column of a parquet file; the library would read all of a row group."""

_OPTION = "--field NAME (tensorkeep train: --data.field NAME)"


class Table:
    """The column of a file that holds texts; see `Table.open`.

    ``columns`` are the names of all columns; ``batches`` yields Arrow arrays of the column's values in order; ``done``
    returns how many bytes of the file a number of rows took.
    """

    def __init__(self, file: TextFile, columns: list[str], batches: Iterator[Any], done: Callable[[int], int]) -> None:
        self.columns = columns
        self.done = done
        self._file = file
        self._batches = batches

    @classmethod
    @contextmanager
    def open(cls, file: TextFile, column: str) -> Iterator[Self]:
        """Open a file.

        Raises MissingExtraError if pyarrow is not installed; UsageError if the file is damaged, or has no such column
        of texts; StoreError if the operating system refuses.
        """
        arrow = _library("pyarrow")
        if file.records == "parquet":
            with _errors(file):
                table = _library("pyarrow.parquet").ParquetFile(file.path, buffer_size=_READ_AT_ONCE, pre_buffer=False)
            with table:
                _check_column(file, column, table.schema_arrow, arrow.types)
                rows = max(1, table.metadata.num_rows)
                parts = table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column], use_threads=False)
                names, values = table.schema_arrow.names, (part.column(0) for part in parts)
                yield cls(file, names, values, lambda number: file.nbytes * number // rows)
            return
        with _errors(file):
            stream = arrow.OSFile(str(file.path))
        with stream:
            with _errors(file):
                reader = arrow.ipc.open_stream(stream)
            _check_column(file, column, reader.schema, arrow.types)
            values = (part.column(column) for part in reader)
            yield cls(file, reader.schema.names, values, lambda number: min(stream.tell(), file.nbytes))

    def texts(self) -> Iterator[str]:
        """Yield the texts; UsageError if a row has none or is not UTF-8, StoreError if the system refuses."""
        number = 0
        while True:
            with _errors(self._file):
                part = next(self._batches, None)
            if part is None:
                return
            for begin in range(0, len(part), _ROWS_AT_ONCE):
                for value in part.slice(begin, _ROWS_AT_ONCE):
                    number += 1
                    yield self._text(value.as_py, number)

    def _text(self, read: Callable[[], str | None], number: int) -> str:
        try:
            text = read()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"row {number:,} is not utf-8 ({error.reason})",
                path=self._file.path,
                remedy="write the column in UTF-8, or leave such rows out",
            ) from error
        if text is None:
            raise UsageError(f"row {number:,} has no text (null)", path=self._file.path, remedy="leave such rows out")
        return text


def _check_column(file: TextFile, column: str, schema: Any, types: Any) -> None:
    places = schema.get_all_field_indices(column)
    if len(places) != 1:
        raise UsageError(
            f"has {len(places) or 'no'} column{'s' * (len(places) > 1)} {column!r}; its columns are "
            f"{', '.join(map(repr, schema.names))}",
            path=file.path,
            remedy=f"name the column of the text: {_OPTION}",
        )
    kind = schema.field(places[0]).type
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise UsageError(
            f"the column {column!r} holds {kind}, not text", path=file.path, remedy=f"name another column: {_OPTION}"
        )


@contextmanager
def _errors(file: TextFile) -> Iterator[None]:
    """Raise the errors of pyarrow as ours."""
    arrow = _library("pyarrow")
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(
            f"the rows of the file do not fit into memory ({error})",
            path=file.path,
            remedy="write it with smaller row groups or record batches",
        ) from error
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise store_error(error, file.path, "read the file") from error
        raise UsageError(
            f"is not a file of {file.records}, or is damaged ({first_line(error)})",
            path=file.path,
            remedy="write the file again, or leave it out",
        ) from error


def _library(name: str) -> Any:
    return import_extra(name, "tables", "parquet files and saved datasets need pyarrow")
