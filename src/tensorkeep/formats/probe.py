"""Errors that name what a file is, where a checkpoint was expected."""

import re
from collections.abc import Iterable
from pathlib import Path

from tensorkeep.errors import NotACheckpointError
from tensorkeep.storage import exists, file_mode, first_bytes

_START_BYTES = 512
_DOWNLOAD = "it is the answer of a web server in the place of the file: download the file again"
_TEXTS = (
    (rb"version https://git-lfs", "a pointer of Git LFS, which stands for the file", "fetch the file: git lfs pull"),
    (rb"(?:\xef\xbb\xbf)?\s*<(?i:!doctype html|html)\b", "an HTML page", _DOWNLOAD),
    (rb"(?:\xef\xbb\xbf)?\s*<\?xml\b", "an XML document", _DOWNLOAD),
)
"""Texts that stand where a file should be: how they begin, what they are, and what to do."""
_CHECK = "check the path; if it was downloaded, this may be the answer of a web server: download it again"
_AS_TORCH = 'if torch.save wrote it, read it as such: format="torch" (--format torch)'
_UNPACK = "unpack it first"
_OTHERS = (
    *_TEXTS,
    (rb"PK\x03\x04", "a zip archive", _AS_TORCH),
    (rb"\x80[\x02-\x05](?!\0\0)", "a Python pickle", _AS_TORCH),
    (rb"GGUF", "a GGUF file", "convert it with the tools of llama.cpp"),
    (rb"\x89HDF\r\n", "an HDF5 file", "read it with h5py, and save its tensors"),
    (rb"\x93NUMPY", "a file of numpy.save", "read it with numpy.load, and save its arrays"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ\0|\x04\x22\x4d\x18", "a compressed file", _UNPACK),
    (rb"7z\xbc\xaf|(?s:.{257})ustar", "an archive", _UNPACK),
    (rb"\s*[{\[][^\0]*\Z", "a JSON text", _CHECK),
    (rb"[\t\r\n\x20-\x7e]{8,}\Z", "a text", _CHECK),
)
"""The same of all kinds of files that their first bytes identify."""


def check_is_no_pointer(path: Path) -> None:
    """Raise NotACheckpointError if a path stands for an absent file: a pointer of Git LFS, or a dangling link."""
    if exists(path) and not file_mode(path):
        raise NotACheckpointError("is a link that leads nowhere", path=path, remedy="fetch the file that it stands for")
    _check_is_none_of(_TEXTS[:1], path, None)


def check_is_no_text(path: Path, cause: Exception | None = None) -> None:
    """Raise NotACheckpointError if a text stands in the place of a file: a pointer of Git LFS, or a web page."""
    _check_is_none_of(_TEXTS, path, cause)


def check_is_no_other(path: Path, cause: Exception | None = None) -> None:
    """Raise NotACheckpointError if a file's first bytes are those of another kind of file, which the error names.

    For files that begin as none of these where they are sound.
    """
    _check_is_none_of(_OTHERS, path, cause)


def _check_is_none_of(kinds: Iterable[tuple[bytes, str, str]], path: Path, cause: Exception | None) -> None:
    start = first_bytes(path, _START_BYTES) or b""
    for pattern, what, remedy in kinds:
        if re.match(pattern, start):
            raise NotACheckpointError(f"is not a checkpoint, but {what}", path=path, remedy=remedy) from cause
