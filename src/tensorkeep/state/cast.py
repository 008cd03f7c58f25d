"""Converting the stored elements of a tensor while they are written into its memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tensorkeep.errors import UsageError, did_you_mean
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.strided import Bytes

if TYPE_CHECKING:
    import torch

DTypeLike: TypeAlias = "torch.dtype | str | None"
"""A torch dtype or its name; None for that of each tensor."""


def float_dtype(dtype: DTypeLike) -> DType:
    """Return the entry of a torch dtype of floating point, also given by its name; UsageError if it is another."""
    name = str(dtype).removeprefix("torch.")
    floats = [each.name for each in BY_NAME.values() if each.kind == "float" and each.has_torch]
    if name not in floats:
        raise UsageError(
            f"{name!r} is not a floating point dtype of torch", remedy=did_you_mean(name, floats, "give one of")
        )
    return BY_NAME[name]


@dataclass(slots=True)
class CastLeaf(Leaf):
    """A stream of elements of ``dtype`` that are written into a new tensor of another dtype, ``array``."""

    def host_bytes(self) -> Bytes | None:
        """Return None: the memory is not the stream."""
        return None

    def write(self, start: int, stop: int, data: Bytes) -> None:
        """Convert the bytes [start, stop) of the stream, multiples of the item size, into the tensor."""
        import torch

        size = self.dtype.itemsize
        elements = torch.from_numpy(data).view(self.dtype.torch)
        self.array.view(-1)[start // size : stop // size].copy_(elements)
