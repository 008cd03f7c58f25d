"""Folders of weights as Hugging Face's libraries write them: the file to read, its index, and other files."""

import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, TensorkeepError
from tensorkeep.formats.base import Reader, StoredLeaf
from tensorkeep.formats.decoding import MAX_HEADER_BYTES, decode_json_object, missing_as
from tensorkeep.state.tree import Flat, placeholders
from tensorkeep.storage import file_mode, first_bytes, folders_in, names_in
from tensorkeep.storage.base import Directory, SourceFile

# ``transformers`` reads the first existing one; ``save_pretrained`` leaves old files behind.
_IN_ORDER = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)

_SHARD = r"-\d+-of-(?!0*1\.)\d+\."
_OF_A_RANK = r"(?:mp|tp|pp|ep|fsdp|fsdp_\d+|world_size_\d+)_rank_?\d+|^(?:model-)?rank[-_]?\d+\b|^shard-\d+-"
_OTHERS = r"(?:^|[a-z])\.\d\d\.pth$|^__\d+_\d+\.distcp$|^ocdbt\.process_\d+$|^(?:rng_state|random_states)_\d+\."
# Names of shards and of files of single ranks: Hugging Face, Megatron, FSDP, Llama, DCP, Orbax, accelerate.
_PART = re.compile(f"{_SHARD}|{_OF_A_RANK}|{_OTHERS}")

# Files that describe a model and hold no tensors.
_DESCRIPTION = re.compile(r"\..*|[A-Z]+|.*\.(?:json|jsonl|txt|md|model|jinja|py|ya?ml|tiktoken|csv|png|jpg|svg|html)")
_INDEX = r"\.index(?:\.[\w-]+)?\.json"
_STATE = re.compile(f"trainer_state\\.json|.*{_INDEX}")

_MOST_NAMED = 10
_MAX_CONFIG_BYTES = 16 * 1024**2


def is_part(name: str) -> bool:
    """Return whether the name of a file or folder says that it holds only some tensors of a checkpoint.

    >>> [is_part(name) for name in ("model-00001-of-00002.safetensors", "consolidated.00.pth", "rank0.safetensors")]
    [True, True, True]
    >>> [is_part(name) for name in ("model-00001-of-00001.safetensors", "lora_rank8.safetensors", "step-10.pt")]
    [False, False, False]
    """
    return _PART.search(name) is not None


def is_index(name: str, suffix: str) -> bool:
    """Return whether a file name is the index of files with a suffix; variants such as fp16 count.

    >>> [is_index(f"model.safetensors.{end}", ".safetensors") for end in ("index.json", "index.fp16.json", "json")]
    [True, True, False]
    """
    return re.search(f"{re.escape(suffix)}{_INDEX}$", name) is not None


def standard_weights(directory: Path, names: Collection[str]) -> str | None:
    """Return the file or the index that ``transformers`` reads in a folder; None if it has neither."""
    return next((name for name in _IN_ORDER if name in names and stat.S_ISREG(file_mode(directory / name))), None)


@dataclass(frozen=True, slots=True)
class Index:
    """The index of several files: file names by tensor, and the bytes of all tensors if given."""

    files: dict[str, str]
    total_size: int | None

    def keys_by_file(self) -> dict[str, str]:
        return {file: key for key, file in self.files.items()}

    def check(self, found: Iterable[tuple[Path, Iterable[str]]]) -> None:
        """Raise CorruptCheckpointError unless each file has exactly the tensors that the index lists for it."""
        paths: dict[str, Path] = {}
        known: set[str] = set()
        for path, keys in found:
            paths[path.name] = path
            for key in keys:
                known.add(key)
                if (listed := self.files.get(key)) != path.name:
                    where = "does not list" if listed is None else f"lists in {listed}"
                    raise CorruptCheckpointError(f"holds a tensor that the index {where}", path=path, name=key)
        # A missing tensor would load as a smaller state, without an error.
        for key in self.files.keys() - known:
            text = "the index lists it in this file, but it is not there"
            raise CorruptCheckpointError(text, path=paths[self.files[key]], name=key)

    def notes(self, flat: Flat[StoredLeaf]) -> Iterator[str]:
        nbytes = sum(leaf.nbytes for leaf in flat.leaves.values())
        # A note, not an error: the number does not change what is read. Placeholders have no known size.
        if self.total_size not in (None, nbytes) and not placeholders(flat.skeleton):
            yield f"the index gives a total_size of {self.total_size:,} bytes, the tensors have {nbytes:,}"


def read_index(directory: Directory, path: Path) -> Index:
    """Return the content of an index; CorruptCheckpointError if it is malformed, or names a file elsewhere."""
    with directory.open(path.name) as file:
        # Before the read: the file decides how much memory it takes.
        if file.size > MAX_HEADER_BYTES:
            raise CorruptCheckpointError(f"is too large for an index: {file.size:,} bytes", path=path)
        content = file.read(0, file.size)
    try:
        found = decode_json_object(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the index is not valid JSON ({error})", path=path) from error
    weight_map, metadata = found.get("weight_map"), found.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError("the index has no weight_map", path=path)
    for name, file_name in weight_map.items():
        # One plain name beside the index: no separator, no parent, no drive.
        if not isinstance(file_name, str) or not re.fullmatch(r"(?!\.\.?$)[^/\\\0:]{1,255}", file_name):
            raise CorruptCheckpointError(
                f"the index names the file {file_name!r}, which is not beside it", path=path, name=name
            )
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weight_map, int(total) if isinstance(total, int | float) and 0 <= total < 2**63 else None)


def open_shard(directory: Directory, name: str, key: str, count: int, *, page_cache: bool = True) -> SourceFile:
    """Open one of ``count`` files of an index; CorruptCheckpointError, with the tensor ``key``, if it is missing."""
    text, path = "the index lists this file, but it is missing", directory.path / name
    remedy = "fetch the missing file, or take another copy"
    with missing_as(CorruptCheckpointError(text, path=path, name=key, remedy=remedy)):
        return directory.open(name, page_cache=page_cache, one_of=count)


def unused_files(directory: Path, used: Collection[str]) -> list[str]:
    """Return the names in a folder that a reader does not use; folders come last, with a slash."""
    folders = {name for name in folders_in(directory) if not name.startswith(".")}
    left = [name for name in names_in(directory) if name not in used and name not in folders]
    return left + [f"{name}/" for name in sorted(folders)]


def add_unused(reader: Reader, directory: Path, used: Collection[str]) -> None:
    """Add the files that a reader does not use to its details and notes."""
    if unused := unused_files(directory, used):
        reader.details["unused_files"] = unused
    reader.notes = [*reader.notes, *notes_on_folder(directory, unused)]


def notes_on_folder(directory: Path, unused: Iterable[str]) -> Iterator[str]:
    names = [name for name in unused if _STATE.fullmatch(name) or not _DESCRIPTION.fullmatch(name)]
    # There may be hundreds of shards.
    names.sort(key=is_part)
    if names:
        rest = f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else ""
        yield f"these files of the folder are not read: {', '.join(names[:_MOST_NAMED])}{rest}"
    method = _quantization(directory)
    if method is not None:
        yield f"config.json has a quantization_config ({method}): the tensors are as stored, not dequantized"


def _quantization(directory: Path) -> str | None:
    try:
        content = first_bytes(directory / "config.json", _MAX_CONFIG_BYTES)
        found: Any = msgspec.json.decode(content or b"{}")
    # Damage in the configuration, which is not part of the checkpoint, stops no load.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TensorkeepError):
        return None
    config = found.get("quantization_config") if isinstance(found, dict) else None
    if not isinstance(config, dict):
        return None
    return str(config.get("quant_method", "of an unknown method"))[:40]
