"""The package ``tensorstore``: imported on first use, with object stores, and with Tensorkeep's errors."""

import os
import re
import stat
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from tensorkeep.errors import (
    CorruptCheckpointError,
    OutOfMemoryError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    import_extra,
)
from tensorkeep.ext import StorePath, as_path, endpoint
from tensorkeep.ext.formats import check_not_pointer
from tensorkeep.ext.storage import (
    Directory,
    file_mode,
    raise_alone,
    store_error,
    store_errors,
    store_requests,
    sync_directory,
)

MAX_METADATA_BYTES = 16 * 1024**2
METADATA_FILE = {2: ".zarray", 3: "zarr.json"}
# The first character after the slash: the sorted names below a folder end before it.
_AFTER_SLASH = chr(ord("/") + 1)


def kvstore_spec(url: StorePath, prefix: str) -> dict[str, Any]:
    """Return the key-value store spec below a URL and a prefix with a slash; UnsupportedError without a driver."""
    # TensorStore's own drivers read object stores. They find credentials in the same places as
    # `tensorkeep.storage.store_requests`, but have neither its endpoint nor a limit of time; both are set here.
    scheme, _, name = url.bucket.partition("://")
    path = f"{url.key}/{prefix}" if url.key else prefix
    if scheme == "s3":
        return {"driver": "s3", "bucket": name, "path": path, **_settings_of_s3()}
    if scheme == "gs":
        return {"driver": "gcs", "bucket": name, "path": path}
    if scheme in ("http", "https"):
        return {"driver": "http", "base_url": url.bucket, "path": f"/{path}"}
    raise UnsupportedError(
        f"TensorStore does not read {scheme}://", path=url, remedy="copy it to a disk, or to s3:// or gs://"
    )


def _settings_of_s3() -> dict[str, Any]:
    server, credentials = endpoint(), None
    # Without a region, TensorStore asks the server for the region of the bucket. Only Amazon's servers answer.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ("us-east-1" if server else None)
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        credentials = {"type": "anonymous"}
    # Its own search prints complaints about missing settings files on stderr.
    elif os.environ.get("AWS_ACCESS_KEY_ID"):
        credentials = {"type": "environment"}
    given: dict[str, Any] = {"endpoint": server, "aws_region": region, "aws_credentials": credentials}
    return {name: value for name, value in given.items() if value}


def retries() -> dict[str, Any]:
    # The same number of retries as our own requests.
    first, longest = store_requests.pauses(store_requests.give_up_seconds())
    limits = {
        "max_retries": store_requests.MOST_RETRIES,
        "initial_delay": f"{first}s",
        "max_delay": f"{max(first, longest)}s",
    }
    return {f"{driver}_request_retries": limits for driver in ("s3", "gcs", "http")}


def patience() -> float:
    # TensorStore itself waits forever.
    return 2 * store_requests.give_up_seconds()


KvStore = Literal["file", "ocdbt"]
_NOISE = re.compile(r"\s*\[(?:source locations|\w+)='(?:[^'\\]|\\.)*'\]")
_FROM_TENSORSTORE = re.compile(r"[A-Z_]+: |Error parsing ")
_STATUS = re.compile(r"^(?:[A-Z_]+): ")
# TensorStore's messages about valid metadata that it does not support.
_UNSUPPORTED = re.compile(
    r"is not registered|not one of the supported|filters are not supported|Unsupported zarr dtype|Unsupported metadata"
    r'|Expected one of .*, but received: "|Must specify a "field"'
    r'|No storage transformers|member "name": Expected .*, but received: "'
    r'|member "zarr_format": Expected integer in .*, but received: \d'
)
_FILE = re.compile(r'local file "([^"]*)"')
# Statuses that say nothing about the stored bytes.
_REFUSALS = (
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNAUTHENTICATED", "DEADLINE_EXCEEDED"),
    *("ABORTED", "UNKNOWN", "INTERNAL"),
)
_STORE_REMEDY = "check the network, the endpoint and the credentials; TENSORKEEP_STORE_TIMEOUT sets how long is tried"
_MAX_MESSAGE = 300


def tensorstore() -> Any:
    """Return the module, which has no type annotations; MissingExtraError if the extra is not installed."""
    return import_extra(
        "tensorstore", "tensorkeep-formats", "reading and writing TensorStore arrays needs the package tensorstore"
    )


def context(
    *,
    concurrency: int | None = None,
    copy_concurrency: int | None = None,
    sync: bool = True,
    cache_bytes: int = 0,
    in_store: bool = False,
) -> Any:
    """Return a new context, which shares no cache with other contexts; ``in_store`` limits retries."""
    limits: dict[str, Any] = {"cache_pool": {"total_bytes_limit": cache_bytes}, "file_io_sync": sync}
    if in_store:
        limits |= retries()
    if concurrency is not None:
        limits["file_io_concurrency"] = {"limit": concurrency}
    if copy_concurrency is not None:
        limits["data_copy_concurrency"] = {"limit": copy_concurrency}
    return tensorstore().Context(limits)


@dataclass(frozen=True)
class ArrayDirectory:
    """A directory or an OCDBT database of arrays, each under a key; ``path`` is the user's path, for errors."""

    path: Path
    # What TensorStore opens, with a slash at the end; empty in an object store.
    root: str
    kvstore: KvStore = "file"

    @classmethod
    def of(cls, directory: Directory, kvstore: KvStore = "file") -> Self:
        # By descriptor: it remains the same directory if the checkpoint is replaced.
        root = "" if isinstance(directory.path, StorePath) else f"{directory.stable_path}/"
        return cls(directory.path, root, kvstore)

    @cached_property
    def _objects(self) -> tuple[dict[str, int], list[str]]:
        # The sizes of the objects of a store by relative name, and the sorted names; a web server lists none.
        if not (isinstance(self.path, StorePath) and self.path.has_listing):
            return {}, []
        start = len(self.path.key) + 1 if self.path.key else 0
        sizes = {status.key[start:]: status.size for status in store_requests.objects(self.path)}
        for name, size in sizes.items():
            if name.rpartition("/")[2] in METADATA_FILE.values():
                check_metadata_size(size, self.path / name)
        return sizes, sorted(sizes)

    def files_of(self, key: str) -> list[tuple[str, int]]:
        """Return names, relative to the array, and sizes of its files; none if it is missing or in a web server."""
        if self.in_store:
            sizes, names = self._objects
            # Sorted names: an array of a large store is found without a look at all objects.
            first, last = (bisect_left(names, key + end) for end in ("/", _AFTER_SLASH)) if key else (0, len(names))
            return [(name[len(key) + 1 if key else 0 :], sizes[name]) for name in names[first:last]]
        top = self.root + key
        # The checkpoint itself may be reached through a link, an array may not.
        if key and os.path.islink(top):
            raise link_error(self.path / key)
        return [*list_tree(top, self.path / key)[0].items()] if os.path.isdir(top) else []

    def stored_bytes(self, key: str) -> int:
        """Return the bytes of all files of an array; UnsupportedError if one is a link to a folder or to nothing."""
        return sum(size for _, size in self.files_of(key))

    def spec(self, key: str = "") -> dict[str, Any]:
        prefix = f"{key}/" if key else ""
        if self.kvstore == "ocdbt":
            return {"driver": "ocdbt", "base": self._base(""), "path": prefix}
        return self._base(prefix)

    def _base(self, prefix: str) -> dict[str, Any]:
        if isinstance(self.path, StorePath):
            return kvstore_spec(self.path, prefix)
        return {"driver": "file", "path": self.root + prefix}

    @property
    def in_store(self) -> bool:
        return isinstance(self.path, StorePath)

    def open_store(self, *, sync: bool = True) -> Any:
        return self.wait(tensorstore().KvStore.open(self.spec(), context=context(sync=sync, in_store=self.in_store)))

    def wait(self, future: Any) -> Any:
        """Return the result of a future; TimeoutError if a store does not answer."""
        return future.result(timeout=patience() if self.in_store else None)

    @contextmanager
    def reading(self, name: str | None = None) -> Iterator[None]:
        """Raise the errors of TensorStore in a block that reads as Tensorkeep's errors."""
        try:
            yield
        except TensorkeepError:
            raise
        except MemoryError as error:
            raise OutOfMemoryError("there is not enough memory to read it", path=self.path, name=name) from error
        # TensorStore raises a ValueError for nearly everything, and other types for malformed files.
        except (ValueError, TypeError, OverflowError, KeyError, IndexError, OSError, NotImplementedError) as error:
            ours = self._read_error(error, name)
            if self.in_store:
                raise_alone(ours)
            if isinstance(ours, CorruptCheckpointError) and ours.path is not None:
                # A file that Git LFS did not fetch looks like damage.
                check_not_pointer(as_path(ours.path))
            raise ours from error

    def _read_error(self, error: Exception, name: str | None) -> TensorkeepError:
        if isinstance(error, TimeoutError):
            text = f"cannot read it: there was no answer for {patience():g} s"
            return StoreError(text, path=self.path, name=name, remedy=_STORE_REMEDY)
        text = str(error)
        message, path = self._message(text)
        number = _error_number(text)
        if text.startswith(_REFUSALS) or (number and not text.startswith("NOT_FOUND")):
            remedy = _STORE_REMEDY if self.in_store else None
            return StoreError(f"cannot read it: {message}", path=path, name=name, remedy=remedy)
        if text.startswith("UNIMPLEMENTED") or _UNSUPPORTED.search(text):
            remedy = (
                "a later TensorStore may: pip install --upgrade tensorstore; "
                "or write the arrays again without what the message names"
            )
            return UnsupportedError(f"TensorStore cannot read it: {message}", path=path, name=name, remedy=remedy)
        remedy = "the stored bytes have changed since the save: take another checkpoint or copy"
        return CorruptCheckpointError(f"TensorStore cannot read it: {message}", path=path, name=name, remedy=remedy)

    def write_error(self, error: BaseException, name: str | None = None) -> BaseException:
        """Return a write error of TensorStore or of the operating system as a TensorkeepError; any other unchanged."""
        if isinstance(error, TensorkeepError):
            return error
        if isinstance(error, OSError):
            return store_error(error, self.path, "write the arrays")
        text = str(error)
        # A ValueError of our own code must keep its type.
        if not _FROM_TENSORSTORE.match(text):
            return error
        message, path = self._message(text)
        if number := _error_number(text):
            return store_error(OSError(number, os.strerror(number)), path, "write the arrays")
        return StoreError(f"TensorStore cannot write it: {message}", path=path, name=name)

    def _message(self, text: str) -> tuple[str, Path]:
        # TensorStore appends source locations and repeats the path.
        message = _STATUS.sub("", _NOISE.sub("", text)).splitlines()[0] if text else "no reason given"
        message = message.replace(self.root, "") if self.root else message
        found = _FILE.search(message)
        path = self.path / found[1] if found and not found[1].startswith("/") else self.path
        return message[:_MAX_MESSAGE], path


def _error_number(text: str) -> int | None:
    # The number of the operating system distinguishes a full or failing disk from damage.
    found = re.search(r"\[os_error_code='(\d+)'\]", text) or re.search(r"OS error (\d+)", text)
    return int(found[1]) if found else None


def list_tree(top: str, shown: Path) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of all files below a directory by relative path, and all folders with a slash, parents first."""
    files: dict[str, int] = {}
    folders = [""]
    for inside in folders:  # grows during the loop
        path = shown / inside
        for entry in scan_folder(f"{top}/{inside}", path):
            # An array may have tens of thousands of chunks: a path is made for errors only.
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{inside}{entry.name}/")
            elif entry.is_file(follow_symlinks=False) or stat.S_ISREG(linked_mode(entry)):
                with store_errors(path, f"read the size of {entry.name}"):
                    size = entry.stat().st_size
                if entry.name in METADATA_FILE.values():
                    check_metadata_size(size, path / entry.name)
                files[inside + entry.name] = size
            # Links to files are followed, because the cache of Hugging Face consists of links. Links to folders and
            # unreadable folders are refused: a skipped folder would mean missing arrays or chunks.
            elif entry.is_symlink():
                raise link_error(path / entry.name)
            else:
                raise UnsupportedError("is neither a file nor a folder", path=path / entry.name, remedy="remove it")
    return files, folders


def scan_folder(folder: str, shown: Path) -> list[os.DirEntry[str]]:
    with store_errors(shown, "list the directory"), os.scandir(folder) as entries:
        # The order of `scandir` differs among file systems; the order of the state must not.
        return sorted(entries, key=lambda entry: entry.name)


def sync_directories(path: Path) -> None:
    """Make all names in and below a directory durable; StoreError if that fails."""
    # Children first, so that no durable name leads to a folder without its own names.
    for folder in reversed(list_tree(str(path), path)[1]):
        with store_errors(path / folder, "make the directories durable"):
            sync_directory(path / folder)


def linked_mode(entry: os.DirEntry[str]) -> int:
    # 0 for other entries, and for links to nothing or to themselves.
    return file_mode(Path(entry.path)) if entry.is_symlink() else 0


def check_metadata_size(size: int, shown: Path) -> None:
    if size > MAX_METADATA_BYTES:
        limit = f"more than the {MAX_METADATA_BYTES:,} that are read"
        raise UnsupportedError(f"has {size:,} bytes of metadata, {limit}", path=shown)


def link_error(shown: Path) -> UnsupportedError:
    return UnsupportedError(
        "is a symbolic link to a folder or to nothing, which is not followed",
        path=shown,
        remedy="copy the checkpoint with what its links point to: cp -rL FOLDER COPY",
    )
