"""Simulated power loss: unsynced writes may be complete, partial or missing afterwards.

`recorded` notes every write, sync and change of a name below a folder. `Recording.crashes` then yields, for every
prefix of what happened, trees that the disk may legally hold after power was lost there:

* what was synced before is there: of a file its bytes and its size, of a directory its names;
* of writes to a file since its last sync, any may be missing or torn, in any order;
* of changes to a directory's names since its last sync, all after some point may be missing. Directories are
  independent of each other, and of the bytes of files. A rename is one change, wherever it leads.

That is what POSIX and the Linux manual pages promise, and less than what journaling file systems keep.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tensorkeep.io import commit

_SECTOR = 512


@dataclass(frozen=True)
class Event:
    """One recorded operation.

    Attributes
    ----------
    kind : str
        ``"write"``, ``"resize"``, ``"sync"``, or a change of names: ``"make"``, ``"name"``, ``"forget"``, ``"move"`` or
        ``"exchange"``.
    node : int
        The file or directory concerned; for changes of names what gets the name, 0 where it is not needed.
    offset : int
        Of a write; of ``"resize"`` the size.
    data : bytes
    places : tuple of (int, str)
        Directories and names in them.
    directory : bool
        Whether ``node`` is one.
    """

    kind: str
    node: int
    offset: int = 0
    data: bytes = b""
    places: tuple[tuple[int, str], ...] = ()
    directory: bool = False


@dataclass
class _Tree:
    """Files and directories by number; 1 is the folder itself."""

    contents: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=lambda: {1: {}})

    def write_out(self, folder: Path, directory: int = 1) -> None:
        folder.mkdir()
        for name, node in self.names[directory].items():
            if node in self.names:
                self.write_out(folder / name, node)
            else:
                (folder / name).write_bytes(self.contents.get(node, b""))

    def change(self, event: Event) -> None:
        """Apply the changes of names whose files exist."""
        directory, name = event.places[0]
        names = self.names.setdefault(directory, {})
        if event.kind in ("make", "name"):
            names[name] = event.node
            if event.directory:
                self.names.setdefault(event.node, {})
            else:
                self.contents.setdefault(event.node, bytearray())
        elif event.kind == "forget":
            names.pop(name, None)
        else:
            other, there = event.places[1]
            others = self.names.setdefault(other, {})
            if event.kind == "move" and name in names:
                others[there] = names.pop(name)
            elif event.kind == "exchange" and name in names and there in others:
                names[name], others[there] = others[there], names[name]

    def store(self, event: Event, *, torn: bool = False) -> None:
        """Write or resize."""
        content = self.contents.setdefault(event.node, bytearray())
        if event.kind == "resize":
            del content[event.offset :]
            content.extend(bytes(event.offset - len(content)))
            return
        data = event.data[: len(event.data) // 2 // _SECTOR * _SECTOR] if torn else event.data
        content.extend(bytes(max(0, event.offset + len(data) - len(content))))
        content[event.offset : event.offset + len(data)] = data


class Recording:
    """The recorded operations below a folder.

    Attributes
    ----------
    events : list of Event
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self._folder = folder
        self._nodes: dict[tuple[int, int], int] = {}
        self._count = 1
        self._start = _Tree()
        self._take(folder, 1)

    def _take(self, folder: Path, directory: int) -> None:
        """Record the existing files, all of them as durable."""
        self._nodes[_identity(folder.stat())] = directory
        for path in sorted(folder.iterdir()):
            identity = _identity(path.lstat())
            node = self._nodes.get(identity) or self._new(identity)
            self._start.names[directory][path.name] = node
            if path.is_dir():
                self._start.names[node] = {}
                self._take(path, node)
            else:
                self._start.contents[node] = bytearray(path.read_bytes())

    def _new(self, identity: tuple[int, int]) -> int:
        self._count += 1
        self._nodes[identity] = self._count
        return self._count

    def crashes(self, seed: int = 0) -> Iterator[tuple[str, Callable[[Path], None]]]:
        """Yield a description of each case, and what writes its tree into a new folder."""
        draw = random.Random(seed)
        for end in range(len(self.events) + 1):
            for policy in _POLICIES:
                tree = self._crashed(end, policy, draw)
                yield f"after {end} of {len(self.events)} events, {policy}", tree.write_out

    def _crashed(self, end: int, policy: str, draw: random.Random) -> _Tree:
        happened = self.events[:end]
        synced: dict[int, int] = {event.node: at for at, event in enumerate(happened) if event.kind == "sync"}
        tree = _Tree(
            {node: bytearray(content) for node, content in self._start.contents.items()},
            {node: dict(names) for node, names in self._start.names.items()},
        )
        cut = {directory: draw.randrange(end + 1) for directory in range(self._count + 1)}
        for at, event in enumerate(happened):
            if event.kind in ("write", "resize"):
                fate = "kept" if at < synced.get(event.node, -1) else _data_fate(policy, draw)
                if fate != "lost":
                    tree.store(event, torn=fate == "torn")
            elif event.kind != "sync":
                durable = all(at < synced.get(directory, -1) for directory, _ in event.places)
                if durable or _names_kept(policy, at, max(cut[directory] for directory, _ in event.places)):
                    tree.change(event)
        return tree


_POLICIES = (
    "nothing more",
    "all of it",
    "names only",
    "bytes only",
    "names and torn bytes",
    "some of it",
    "other parts",
)


def _data_fate(policy: str, draw: random.Random) -> str:
    if policy in ("nothing more", "names only"):
        return "lost"
    if policy in ("all of it", "bytes only"):
        return "kept"
    if policy == "names and torn bytes":
        return "torn"
    return draw.choice(("kept", "lost", "torn"))


def _names_kept(policy: str, at: int, cut: int) -> bool:
    if policy in ("nothing more", "bytes only"):
        return False
    if policy in ("all of it", "names only", "names and torn bytes"):
        return True
    return at < cut


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class _Recorder:
    """Stand-ins for the functions by which writers change the file system."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._real = {name: getattr(os, name) for name in _FUNCTIONS}
        self._root = os.path.realpath(recording._folder)

    def _add(self, kind: str, node: int, **details: Any) -> None:
        self._recording.events.append(Event(kind, node, **details))

    def _node(self, fd: int) -> int | None:
        return self._recording._nodes.get(_identity(os.fstat(fd)))

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """Return the directory and the name of a path, if it is below the folder."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        folder = os.path.realpath(folder)
        if not (folder == self._root or folder.startswith(self._root + os.sep)):
            return None
        return self._recording._nodes[_identity(os.stat(folder))], name

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd: int = self._real["open"](path, flags, *args, **kwargs)
        place = self._place(path, kwargs.get("dir_fd")) if flags & os.O_CREAT else None
        if place is not None and flags & os.O_EXCL:
            self._add("make", self._recording._new(_identity(os.fstat(fd))), places=(place,))
        return fd

    def mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        place = self._place(path, kwargs.get("dir_fd"))
        self._real["mkdir"](path, *args, **kwargs)
        if place is not None:
            node = self._recording._new(_identity(os.stat(path)))
            self._add("make", node, places=(place,), directory=True)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        written: int = self._real["pwrite"](fd, data, offset)
        node = self._node(fd)
        if node is not None:
            self._add("write", node, offset=offset, data=bytes(memoryview(data)[:written]))
        return written

    def ftruncate(self, fd: int, size: int) -> None:
        self._real["ftruncate"](fd, size)
        node = self._node(fd)
        if node is not None:
            self._add("resize", node, offset=size)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        self._real["posix_fallocate"](fd, offset, size)
        node = self._node(fd)
        if node is not None:
            self._add("resize", node, offset=os.fstat(fd).st_size)

    def fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        node = self._node(fd)
        if node is not None:
            self._add("sync", node)

    def link(self, source: Any, target: Any, **kwargs: Any) -> None:
        place = self._place(target)
        self._real["link"](source, target, **kwargs)
        if place is not None:
            self._add("name", self._recording._nodes[_identity(os.stat(target))], places=(place,))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        self._real["unlink"](path, dir_fd=dir_fd)
        if place is not None:
            self._add("forget", 0, places=(place,))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        self._real["rmdir"](path, dir_fd=dir_fd)
        if place is not None:
            self._add("forget", 0, places=(place,))

    def rename(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._move("rename", source, target, **kwargs)

    def replace(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._move("replace", source, target, **kwargs)

    def _move(self, how: str, source: Any, target: Any, **kwargs: Any) -> None:
        places = self._place(source), self._place(target)
        self._real[how](source, target, **kwargs)
        if places[0] is not None and places[1] is not None:
            self._add("move", 0, places=(places[0], places[1]))

    def renameat2(self, source: Path, target: Path, flag: int) -> None:
        places = self._place(source), self._place(target)
        _RENAMEAT2(source, target, flag)
        if places[0] is not None and places[1] is not None:
            kind = "exchange" if flag == commit._RENAME_EXCHANGE else "move"
            self._add(kind, 0, places=(places[0], places[1]))


_FUNCTIONS = (
    "open",
    "mkdir",
    "pwrite",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "link",
    "unlink",
    "rmdir",
    "rename",
    "replace",
)
_RENAMEAT2 = commit._rename


@contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Record the operations below a folder; existing files count as durable."""
    recording = Recording(folder)
    recorder = _Recorder(recording)
    with ExitStack() as stack:
        for name in _FUNCTIONS:
            stack.enter_context(mock.patch.object(os, name, getattr(recorder, name)))
        stack.enter_context(mock.patch.object(commit, "_rename", recorder.renameat2))
        yield recording
