"""Finding text files: below a folder, by a pattern, or the sources of Python's standard library."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.errors import NotACheckpointError, UsageError
from tensorkeep.io.files import store_error

RECORDS = ".jsonl"

# fmt: off
SUFFIXES = frozenset(
    (
        ".txt", ".text", ".md", ".rst", ".adoc", ".org", ".tex", ".jsonl", ".py", ".pyi", ".c", ".h", ".cc",
        ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".cs", ".js", ".jsx", ".mjs", ".ts",
        ".tsx", ".php", ".pl", ".rb", ".lua", ".r", ".jl", ".hs", ".ml", ".lisp", ".el", ".swift", ".sh",
        ".sql", ".html", ".css",
    )
)
# fmt: on
"""What a file's name ends in to be taken for text in a folder; a pattern takes every file that it matches."""

MAGIC = frozenset("*?[")

# Tests, generated tables and copies of whole texts: no program text that a person wrote to be read.
# fmt: off
_NOT_THE_LIBRARY = frozenset(
    (
        "site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo",
        "encodings", "pydoc_data",
    )
)
# fmt: on


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of a corpus.

    Attributes
    ----------
    name : str
        Its path below the folder that was searched: the same wherever that folder lies.
    path : Path
    nbytes : int
        Its size when it was found.
    """

    name: str
    path: Path
    nbytes: int

    @property
    def has_records(self) -> bool:
        """Whether each of its lines is a JSON object with a document in it."""
        return self.path.suffix.lower() == RECORDS


def text_file(path: Path, name: str) -> TextFile:
    """Return a file by its path.

    Raises
    ------
    StoreError
        If it cannot be looked at, as at the end of links that lead in a circle.
    UsageError
        If it is no regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise store_error(error, path, "read the file") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("is not a regular file", path=path, remedy='give "-" and pipe what it holds into the command')
    return TextFile(name, path, status.st_size)


def in_folder(folder: Path) -> list[TextFile]:
    """Return the text files below a folder, by name; names that begin with a dot are passed over.

    Raises
    ------
    NotACheckpointError
        If there is none.
    StoreError
        If the operating system refuses.
    UsageError
        If a link leads back to a folder above it.
    """
    found = _sorted(folder, (path for path in _walk(folder, lambda name: True) if path.suffix.lower() in SUFFIXES))
    if not found:
        raise NotACheckpointError(
            "holds no text files",
            path=folder,
            remedy=f"name them by a pattern such as '{folder}/**/*.log'; without one, names end in {_some_suffixes()}",
        )
    return found


def matching(pattern: str) -> list[TextFile]:
    """Return the files that a pattern matches, by name; ``**`` stands for folders at any depth and follows no links.

    Raises
    ------
    NotACheckpointError
        If there is none.
    StoreError
        If the operating system refuses.
    UsageError
        If it is no pattern.
    """
    parts = Path(pattern).parts
    fixed = next(place for place, part in enumerate(parts) if MAGIC & set(part))
    root, rest = Path(*parts[:fixed]), "/".join(parts[fixed:])
    try:
        paths = [path for path in root.glob(rest) if not path.is_dir() and not _is_hidden(path.relative_to(root))]
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{pattern!r} is no pattern: {error}", remedy="`**` stands alone between slashes") from error
    except OSError as error:
        raise store_error(error, root, "list the folder") from error
    if not paths:
        raise NotACheckpointError(f"the pattern {pattern!r} matches no file", remedy="check it, and quote it")
    return _sorted(root, iter(paths))


def standard_library() -> list[TextFile]:
    """Return the sources of the standard library of the Python that runs, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise NotACheckpointError("this Python has no sources of its library", path=root)
    walked = _walk(root, lambda name: name not in _NOT_THE_LIBRARY and not name.startswith("config-"))
    found = _sorted(root, (path for path in walked if path.suffix == ".py"))
    if not found:
        raise NotACheckpointError("this Python has no sources of its library", path=root)
    return found


def _sorted(root: Path, paths: Iterator[Path]) -> list[TextFile]:
    named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
    return [text_file(path, name) for name, path in named]


def _walk(root: Path, enters: Callable[[str], bool]) -> Iterator[Path]:
    """Yield everything below a folder but folders, in no order, through links as well."""
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(root, frozenset())]
    while waiting:
        folder, above = waiting.pop()
        try:
            status = folder.stat()
            with os.scandir(folder) as entries:
                found = [(Path(entry.path), entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            raise store_error(error, folder, "list the folder") from error
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise UsageError(
                "is a link that leads back to a folder above it",
                path=folder,
                remedy="remove the link, or name the files",
            )
        for path, is_folder in found:
            if not is_folder:
                yield path
            elif enters(path.name):
                waiting.append((path, above | {here}))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _some_suffixes() -> str:
    return ", ".join(sorted(SUFFIXES)[:4]) + ", ..."
