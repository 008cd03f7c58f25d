"""Reading the pickle of a torch file without executing it, with a limit on the expanded size."""

import io
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, TensorkeepError, UnsupportedError
from tensorkeep.formats.decoding import decoding
from tensorkeep.formats.torch_file.allowed import COMMANDS
from tensorkeep.formats.torch_file.old_file import OldFile
from tensorkeep.formats.torch_file.rebuild import SCRIPT, TRUST, StateRebuilder, allow_remedy, is_known
from tensorkeep.formats.torch_file.zip_file import TorchZip
from tensorkeep.placeholder import Placeholder

if TYPE_CHECKING:
    import torch

SHARED_VALUES = 1_000_000
"""Values that containers may add by containing one another; see `count_values`."""


class Unpickled(NamedTuple):
    """The state of a torch file.

    ``refusal`` is the error for a load that does not leave out the objects of classes that are not allowed; None if the
    file has none. ``attributes`` are the names of attributes of tensors and dicts that the state does not have, and
    ``others`` the number of values of a TorchScript archive that are no tensors. ``storages`` are the keys of the
    storages of tensors in the state.
    """

    state: Any
    refusal: UnsupportedError | None
    attributes: list[str]
    storages: frozenset[str]
    others: int = 0


def restricted_load(file: io.BytesIO) -> Any:
    """Return what torch's restricted unpickler reads from a file; raises the errors of torch, of almost any type."""
    import torch

    with warnings.catch_warnings():
        # Torch warns about some exotic dtypes.
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(file, map_location="cpu", weights_only=True)


def load_untrusted(whole: Any, archive: TorchZip | OldFile, path: Path, allow: Collection[str] = ()) -> Unpickled:
    """Return the state of a file, whose tensors lie in ``whole``, the content of the file; nothing in it is executed.

    Raises UnsupportedError if it names what runs programs or code, or has an opcode that is not known;
    CorruptCheckpointError if it is damaged; OutOfMemoryError if there is not enough memory.
    """
    import torch

    content = torch.empty(0, dtype=torch.uint8).set_(whole).numpy()

    used: set[str] = set()

    def storage(key: str, nbytes: int) -> Any:
        used.add(key)
        start = archive.storage_at(key, content)
        return whole[start : start + nbytes]

    try:
        found, recorder = archive.pickled()
    except ValueError as error:
        if archive.checksummed:
            # Its CRC-32 is right, so the pickle is not damaged.
            raise UnsupportedError(f"its pickle cannot be decoded ({error})", path=path, remedy=TRUST) from error
        raise CorruptCheckpointError(f"its pickle is damaged ({error})", path=path) from error
    names = [name for name in recorder.globals if not is_known(name) and name not in allow]
    names = sorted(name for name in names if not (archive.is_script and name.startswith(SCRIPT)))
    refusal = _refusal(path, names) if names else None
    if refusal is not None and any(COMMANDS.fullmatch(name) for name in names):
        raise refusal
    rebuilder = StateRebuilder(storage, allow, SHARED_VALUES + 16 * archive.pickle_bytes, script=archive.is_script)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            state = rebuilder.value(found)
    except TensorkeepError as error:
        error.path = error.path or str(path)
        raise
    except MemoryError as error:
        raise OutOfMemoryError("there is not enough memory to open it", path=path) from error
    # Hostile bytes make torch raise almost any type.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        text = f"its pickle contradicts itself ({type(error).__name__}: {reason})"
        raise CorruptCheckpointError(text, path=path) from error
    if not archive.is_script:
        return Unpickled(state, refusal, [*rebuilder.attributes], frozenset(used))
    with decoding(path):
        count_values(state, SHARED_VALUES + 4 * archive.pickle_bytes)
    tensors: dict[str, Any] = {}
    others = _collect_tensors(state, "", tensors, set())
    if archive.constants and not tensors:
        raise UnsupportedError(
            "is a frozen TorchScript module: its weights are constants of its code, which have no names",
            path=path,
            remedy="save the state_dict of the module that torch.jit.freeze was called with",
        )
    return Unpickled(tensors, refusal, [*rebuilder.attributes], frozenset(used), others)


def storage_of(content: np.ndarray[Any, Any]) -> "torch.UntypedStorage":
    """Return a copy of some bytes as a storage."""
    import torch

    return torch.from_numpy(np.array(content)).untyped_storage()


def _collect_tensors(value: Any, name: str, found: dict[str, Any], inside: set[int]) -> int:
    """Put the tensors of a module's attributes under their dotted names; return the number of other values."""
    import torch

    if isinstance(value, torch.Tensor | Placeholder):
        # As in a state dict.
        found[name] = value.detach() if isinstance(value, torch.Tensor) else value
        return 0
    if not isinstance(value, dict | list | tuple) or id(value) in inside:
        return 1
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inside.add(id(value))
    others = sum(_collect_tensors(item, f"{name}.{key}" if name else str(key), found, inside) for key, item in items)
    inside.remove(id(value))
    return others


def _refusal(path: Path, names: list[str]) -> UnsupportedError:
    commands = [name for name in names if COMMANDS.fullmatch(name)]
    calls = f"its pickle calls {', '.join(names)}: loading it would run code from the file"
    remedy = f'to read all else, select="*"; {allow_remedy(names)}'
    if commands:
        remedy = f"do not load it elsewhere: a checkpoint has no use for {commands[0]}, which runs code"
    return UnsupportedError(calls, path=path, remedy=remedy)


def count_values(state: object, limit: int) -> int:
    """Return the number of items in all containers of a state, counted as often as they are reached.

    A pickle of 60 lists, each of which contains the next one twice, has 2**60 items. A container inside of itself
    counts once.

    Raises UnsupportedError if there are more than the limit.

    Examples
    --------
    >>> count_values({"a": [1, 2]}, 10)
    5
    """
    count = 0
    around: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(state, True)]
    while waiting:
        value, enters = waiting.pop()
        if not enters:
            around.remove(id(value))
        elif isinstance(value, dict | list | tuple | set) and id(value) not in around:
            count += 1 + len(value)
            if count > limit:
                raise UnsupportedError(
                    f"its pickle expands to more than {limit:,} values",
                    remedy="its containers contain one another many times: save each once",
                )
            around.add(id(value))
            waiting.append((value, False))
            waiting.extend((item, True) for item in (value.values() if isinstance(value, dict) else value))
    return count
