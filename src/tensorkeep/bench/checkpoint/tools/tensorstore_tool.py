"""TensorStore's arrays, with every setting, and T5X's layout of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.checkpoint.save.save import save
from tensorkeep.formats.base import FORMATS
from tensorkeep.io.parallel import default_threads

_T5X_CONCURRENCY = 128
_MEMORY = "4GiB"
"""Of arrays in flight: so much that it bounds no setting that is measured."""


class TensorstoreTool(Tool, frozen=True, tag="tensorstore"):
    """`tensorkeep.save` with ``format="tensorstore"``; the fields are the options of that format, with its defaults.

    Loads as the TensorStore user does: open, read, convert back to what was saved; one array after the other if
    ``in_flight`` says so.
    """

    zarr: Literal[2, 3] | UnsetType = UNSET
    chunk: int | str | UnsetType | None = UNSET
    chunking: str | UnsetType = UNSET
    concurrency: int | UnsetType | None = UNSET
    copy_concurrency: int | UnsetType | None = UNSET
    compressor: str | UnsetType | None = UNSET
    dtype: str | UnsetType = UNSET
    shard_bytes: int | str | UnsetType | None = UNSET
    checksum: str | UnsetType | None = UNSET
    kvstore: str | UnsetType = UNSET
    sync: bool | UnsetType = UNSET
    in_flight: str | UnsetType = UNSET

    suffix: ClassVar[str] = ".arrays"
    needs: ClassVar[str | None] = "tensorstore"
    format: ClassVar[str] = "tensorstore"

    @property
    def durable(self) -> bool:
        return self.sync is not False

    @property
    def options(self) -> dict[str, Any]:
        """The settings that were given."""
        given = msgspec.structs.asdict(self)
        return {name: value for name, value in given.items() if value is not UNSET}

    def check(self) -> None:
        FORMATS.get(self.format).parse_options(self.options)

    def save(self, state: Any, path: Path) -> None:
        save(state, path, format=self.format, threads=default_threads(), memory_budget=_MEMORY, **self.options)

    def load(self, path: Path) -> Any:
        from tensorkeep.bench.checkpoint.tools.whole_arrays import load_tensorstore

        options = self.options
        return load_tensorstore(path, **{key: options[key] for key in ("concurrency", "in_flight") if key in options})


class T5xTool(TensorstoreTool, frozen=True, tag="t5x"):
    """`tensorkeep.save` with ``format="t5x"``: the same arrays in T5X's layout, with its choices as defaults."""

    suffix: ClassVar[str] = ".t5x"
    format: ClassVar[str] = "t5x"

    def load(self, path: Path) -> Any:
        from tensorkeep.bench.checkpoint.tools.whole_arrays import load_t5x

        options = {"concurrency": _T5X_CONCURRENCY, **self.options}
        return load_t5x(path, **{key: options[key] for key in ("concurrency", "in_flight") if key in options})
