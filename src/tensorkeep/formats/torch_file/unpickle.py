"""Loading through torch's restricted unpickler, with a limit on the expanded size."""

import io
import json
import re
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, UnsupportedError
from tensorkeep.formats.torch_file.allowed import (
    COMMANDS,
    NUMPY,
    TRUST,
    Container,
    allowing,
    container_of,
    with_plain_objects,
)
from tensorkeep.formats.torch_file.zip_file import TorchZip

SHARED_VALUES = 1_000_000
"""Values that containers may add by containing one another; see `count_values`."""


def restricted_load(file: str | io.BytesIO, allow: Collection[str] = ()) -> Any:
    """Return the content of a ``torch.save`` file: tensors and plain values only.

    The tensors of a file that is given by its path are memory-mapped. Objects of the classes in ``allow`` become
    dicts. Raises the errors of torch, of almost any type.
    """
    import torch

    containers: dict[str, Container] = {}
    while True:
        try:
            with warnings.catch_warnings(), allowing(allow, containers):
                # Torch warns about some exotic dtypes.
                warnings.simplefilter("ignore", UserWarning)
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
            return with_plain_objects(state) if allow else state
        except UnpicklingError as error:
            # The pickle does not say which classes are subclasses of dict or list, before it fills their objects.
            found = container_of(str(error))
            if found is None or found[0] not in allow or found[0] in containers:
                raise
            containers[found[0]] = found[1]
            if isinstance(file, io.BytesIO):
                file.seek(0)


def load_untrusted(file: str | io.BytesIO, archive: TorchZip, path: Path, allow: Collection[str] = ()) -> Any:
    """Call `restricted_load` with a file whose container was checked, and raise its errors with the path.

    Raises UnsupportedError if it needs classes or functions that the restricted unpickler refuses;
    CorruptCheckpointError if it is damaged; OutOfMemoryError if there is not enough memory.
    """
    try:
        return restricted_load(file, allow)
    except UnpicklingError as error:
        raise _refusal(str(error), path, archive, _unknown_names(file, allow)) from error
    except MemoryError as error:
        raise OutOfMemoryError("there is not enough memory to open it", path=path) from error
    # Hostile bytes make torch and its unpickler raise almost any type.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CorruptCheckpointError(f"torch cannot read it ({type(error).__name__}: {reason})", path=path) from error


def _unknown_names(file: str | io.BytesIO, allow: Collection[str]) -> list[str]:
    """Return the names of classes and functions that the pickle uses and nobody allows, as far as they can be found."""
    import torch

    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - set(allow))
    # It is given up at the first operation that the unpickler would refuse.
    except Exception:
        return []


def _refusal(
    message: str, path: Path, archive: TorchZip, names: Sequence[str]
) -> UnsupportedError | CorruptCheckpointError:
    found = re.search(r"GLOBAL ([^\s,]+)|unrecognized function ([^\s,]+)", message)
    if found:
        names = names or [found[1] or found[2]]
        calls = f"its pickle calls {', '.join(names)}: loading it would run code from the file"
        return UnsupportedError(calls, path=path, remedy=_way_on(names))
    reason = re.search(r"WeightsUnpickler error:\s*(.{0,200})", message)
    detail = reason[1] if reason else message[:200]
    if archive.checksummed:
        # Its CRC-32 is right, so the pickle is not damaged.
        refuses = f"torch's restricted unpickler refuses its pickle ({detail})"
        return UnsupportedError(refuses, path=path, remedy=TRUST)
    return CorruptCheckpointError(f"its pickle is damaged ({detail})", path=path)


def _way_on(names: Sequence[str]) -> str:
    commands = [name for name in names if COMMANDS.fullmatch(name)]
    if commands:
        return f"do not load it elsewhere: a checkpoint has no use for {commands[0]}, which runs code"
    short = dict.fromkeys("numpy" if name in NUMPY else name for name in names)
    return f"to read such objects as dicts, without running their code: allow={json.dumps([*short])}"


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
                    remedy="its containers contain themselves, or one another many times: save each once",
                )
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return count
