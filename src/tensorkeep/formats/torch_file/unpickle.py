"""Loading through torch's restricted unpickler, with a limit on the expanded size."""

import io
import re
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, UnsupportedError
from tensorkeep.formats.torch_file.zip_file import TorchZip

SHARED_VALUES = 1_000_000
"""Values that containers may add by containing one another; see `count_values`."""

_TRUST = "if you trust it, load it with torch.load(weights_only=False) and save tensors and plain values"


def restricted_load(file: str | io.BytesIO) -> Any:
    """Return the content of a ``torch.save`` file: tensors and plain values only.

    The tensors of a file that is given by its path are memory-mapped. Raises the errors of torch, of almost any type.
    """
    import torch

    with warnings.catch_warnings():
        # Torch warns about some exotic dtypes.
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))


def load_untrusted(file: str | io.BytesIO, archive: TorchZip, path: Path) -> Any:
    """Call `restricted_load` with a file whose container was checked, and raise its errors with the path.

    Raises UnsupportedError if it needs classes or functions that the restricted unpickler refuses;
    CorruptCheckpointError if it is damaged; OutOfMemoryError if there is not enough memory.
    """
    try:
        return restricted_load(file)
    except UnpicklingError as error:
        raise _refusal(str(error), path, archive) from error
    except MemoryError as error:
        raise OutOfMemoryError("there is not enough memory to open it", path=path) from error
    # Hostile bytes make torch and its unpickler raise almost any type.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CorruptCheckpointError(f"torch cannot read it ({type(error).__name__}: {reason})", path=path) from error


def _refusal(message: str, path: Path, archive: TorchZip) -> UnsupportedError | CorruptCheckpointError:
    found = re.search(r"GLOBAL ([^\s,]+)|unrecognized function ([^\s,]+)", message)
    if found:
        calls = f"its pickle calls {found[1] or found[2]}: loading it would run code from the file"
        return UnsupportedError(calls, path=path, remedy=_TRUST)
    reason = re.search(r"WeightsUnpickler error: (.{0,200})", message)
    detail = reason[1] if reason else message[:200]
    if archive.checksummed:
        # Its CRC-32 is right, so the pickle is not damaged.
        refuses = f"torch's restricted unpickler refuses its pickle ({detail})"
        return UnsupportedError(refuses, path=path, remedy=_TRUST)
    return CorruptCheckpointError(f"its pickle is damaged ({detail})", path=path)


def count_values(state: object, limit: int) -> int:
    """Return the number of items in all containers of a state, counted as often as they are reached.

    A pickle of 60 lists, each of which contains the next one twice, has 2**60 items.

    Raises UnsupportedError if there are more than the limit.

    Examples
    --------
    >>> count_values({"a": [1, 2]}, 10)
    5
    """
    count = 0
    waiting: list[Any] = [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple | set):
            count += 1 + len(value)
            if count > limit:
                raise UnsupportedError(
                    f"its pickle expands to more than {limit:,} values",
                    remedy="its containers contain one another many times: save each once",
                )
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return count
