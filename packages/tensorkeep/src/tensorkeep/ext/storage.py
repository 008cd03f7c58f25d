"""Files and folders on disks and in object stores: read, write durably, commit, run in parallel."""

from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import file_mode, first_bytes, folders_in, names_in, parallel, read_directory, store_requests
from tensorkeep.storage.base import Directory, SourceFile
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.commit import Commit, FolderLock, remove_abandoned, replace_file
from tensorkeep.storage.direct_io import DirectFile, sync_directory, write_small
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.parallel import Cancelled, Meter, Progress, default_threads
from tensorkeep.storage.store_requests import raise_alone
from tensorkeep.storage.system_errors import store_error, store_errors

__all__ = [
    "DEFAULT_BUDGET",
    "Bytes",
    "Cancelled",
    "Commit",
    "DirectFile",
    "Directory",
    "FolderLock",
    "LocalDirectory",
    "Meter",
    "Progress",
    "SourceFile",
    "default_threads",
    "file_mode",
    "first_bytes",
    "folders_in",
    "names_in",
    "parallel",
    "raise_alone",
    "read_directory",
    "remove_abandoned",
    "replace_file",
    "store_error",
    "store_errors",
    "store_requests",
    "sync_directory",
    "write_small"
]  # fmt: skip
