"""Tools that store one array per tensor: TensorStore, T5X's layout and Orbax."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.results import Settings
from tensorkeep.checkpoint.saving import save
from tensorkeep.formats.base import FORMATS
from tensorkeep.storage.parallel import default_threads

if TYPE_CHECKING:
    import torch

_T5X_CONCURRENCY = 128
_MEMORY = "4GiB"
"""Memory for arrays in flight: enough that it limits none of the settings that are measured."""


class TensorstoreTool(Tool, frozen=True, tag="tensorstore"):
    """`tensorkeep.save` with ``format="tensorstore"``, whose options are the settings.

    It loads as users of TensorStore do: open and read whole arrays, and convert them back to the dtype that was saved.
    ``in_flight="one"`` writes and reads one array after the other.
    """

    options: Settings

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
        save(state, path, format=self.format, threads=default_threads(), memory_budget=_MEMORY, **self.options)

    def load(self, path: Path) -> Any:
        from tensorkeep.bench.checkpoint.tools.whole_arrays import load_tensorstore

        return load_tensorstore(path, **self._reading())

    def _reading(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key in ("concurrency", "in_flight")}


class T5xTool(TensorstoreTool, frozen=True, tag="t5x"):
    """`tensorkeep.save` with ``format="t5x"``: the same arrays in T5X's layout, with T5X's settings as defaults."""

    suffix: ClassVar[str] = ".t5x"
    format: ClassVar[str] = "t5x"

    def load(self, path: Path) -> Any:
        from tensorkeep.bench.checkpoint.tools.whole_arrays import load_t5x

        return load_t5x(path, **{"concurrency": _T5X_CONCURRENCY, **self._reading()})


class OrbaxTool(Tool, frozen=True, tag="orbax"):
    """Orbax's synchronous ``PyTreeCheckpointer`` on numpy arrays, with its defaults (OCDBT, its own compression)."""

    package: ClassVar[str | None] = "orbax"

    def save(self, state: Any, path: Path) -> None:
        import orbax.checkpoint as ocp

        ocp.PyTreeCheckpointer().save(path.absolute(), to_arrays(state))

    def load(self, path: Path) -> Any:
        import orbax.checkpoint as ocp

        return to_tensors(ocp.PyTreeCheckpointer().restore(path.absolute()))


def to_arrays(tensors: "Mapping[str, torch.Tensor]") -> dict[str, npt.NDArray[Any]]:
    """Return CPU tensors as numpy arrays of the same dtype that share their memory; bfloat16 is ``ml_dtypes``'."""
    import ml_dtypes
    import torch

    return {
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in tensors.items()
    }


def to_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> "dict[str, torch.Tensor]":
    """Return numpy arrays as tensors that share their memory: the inverse of `to_arrays`."""
    import torch

    return {
        name: torch.from_numpy(np.asarray(array).view(np.uint16)).view(torch.bfloat16)
        if array.dtype.name == "bfloat16"
        else torch.from_numpy(np.asarray(array))
        for name, array in arrays.items()
    }
