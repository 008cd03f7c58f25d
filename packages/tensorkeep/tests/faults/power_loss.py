"""Simulated power loss: unsynced writes may be complete, partial or missing afterwards.

`recorded` notes every write, sync and change of a name below a folder. `Recording.crashes` then returns, for every
prefix of what happened, trees that the disk may legally hold after power was lost there:

* what was synced before is there: of a file its bytes and its size, of a directory its names;
* of writes to a file since its last sync, any may be missing or torn, in any order;
* of changes to a directory's names since its last sync, all after some point may be missing. Directories are
  independent of each other, and of the bytes of files. A rename is one change, wherever it leads.

That is what POSIX and the Linux manual pages promise, and less than what journaling file systems keep.
"""

import os
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from faults.injection import OPERATIONS
from tensorkeep.storage import commit

_SECTOR = 512


@dataclass(frozen=True)
class Event:
    """One recorded operation.

    Its kind is ``"write"``, ``"resize"`` (the offset is the size), ``"sync"``, or a change of names: ``"make"``,
    ``"name"``, ``"forget"``, ``"move"`` or ``"exchange"``. The node is the file or directory concerned; for changes of
    names what gets the name, 0 where it is not needed. The places are directories and names in them.
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
    """The recorded operations below a folder, as a list of events."""

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

    def crashes(self) -> list["Crash"]:
        """Return all cases."""
        return [Crash(self, end, policy) for end in range(len(self.events) + 1) for policy in _POLICIES]

    def crashed(self, end: int, policy: str) -> _Tree:
        """Return what the disk holds after so many events; what a policy leaves open is drawn, always equally."""
        draw = random.Random(f"{end}, {policy}")
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


class Crash(NamedTuple):
    """Power that is lost after so many events of a recording; the policy says what else the disk holds."""

    recording: Recording
    end: int
    policy: str

    def __str__(self) -> str:
        return f"after {self.end} of {len(self.recording.events)} events, {self.policy}"

    @property
    def returned(self) -> bool:
        """Whether all that was recorded had happened."""
        return self.end == len(self.recording.events)

    def write_out(self, folder: Path) -> None:
        """Write what the disk holds into a new folder."""
        self.recording.crashed(self.end, self.policy).write_out(folder)


_POLICIES = (
    *("nothing more", "all of it", "names only", "bytes only"),
    *("names and torn bytes", "some of it", "other parts"),
)


def _data_fate(policy: str, draw: random.Random) -> str:
    if policy in ("nothing more", "names only"):
        return "lost"
    if policy in ("all of it", "bytes only"):
        return "kept"
    return "torn" if policy == "names and torn bytes" else draw.choice(("kept", "lost", "torn"))


def _names_kept(policy: str, at: int, cut: int) -> bool:
    if policy in ("nothing more", "bytes only"):
        return False
    return policy in ("all of it", "names only", "names and torn bytes") or at < cut


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class _Recorder:
    """Notes what the functions change by which writers change the file system.

    Each method looks at the arguments of the function of its name, yields while that is called, and notes the change.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._root = os.path.realpath(recording._folder)

    def stand_in(self, real: Callable[..., Any], note: Callable[..., Generator[None, Any, None]]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            noting = note(*args, **kwargs)
            next(noting)
            result = real(*args, **kwargs)
            with suppress(StopIteration):
                noting.send(result)
            return result

        return operation

    def _add(self, kind: str, node: int | None, *places: tuple[int, str] | None, **details: Any) -> None:
        """Add an event, unless it concerns anything else than the folder."""
        if node is not None and None not in places:
            self._recording.events.append(Event(kind, node, places=places, **details))  # type: ignore[arg-type]

    def _node(self, path: Any) -> int | None:
        """Return the number of a file, by its descriptor or path, if it is below the folder."""
        return self._recording._nodes.get(_identity(os.stat(path)))

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

    def open(self, path: Any, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> Generator[None, Any, None]:
        makes = flags & os.O_CREAT and (flags & os.O_EXCL or not os.path.lexists(path))
        fd = yield
        place = self._place(path, dir_fd) if makes else None
        if place is not None:
            self._add("make", self._recording._new(_identity(os.fstat(fd))), place)

    def mkdir(self, path: Any, mode: int = 0, *, dir_fd: int | None = None) -> Generator[None, Any, None]:
        place = self._place(path, dir_fd)
        yield
        if place is not None:
            self._add("make", self._recording._new(_identity(os.stat(path))), place, directory=True)

    def pwrite(self, fd: int, data: Any, offset: int) -> Generator[None, Any, None]:
        written = yield
        self._add("write", self._node(fd), offset=offset, data=bytes(memoryview(data)[:written]))

    def ftruncate(self, fd: int, *sizes: int) -> Generator[None, Any, None]:
        yield
        self._add("resize", self._node(fd), offset=os.fstat(fd).st_size)

    posix_fallocate = ftruncate

    def fsync(self, fd: int) -> Generator[None, Any, None]:
        yield
        self._add("sync", self._node(fd))

    def link(self, source: Any, target: Any, **kwargs: Any) -> Generator[None, Any, None]:
        yield
        self._add("name", self._node(target), self._place(target))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> Generator[None, Any, None]:
        yield
        self._add("forget", 0, self._place(path, dir_fd))

    rmdir = unlink

    def rename(self, source: Any, target: Any, flag: int = 0, **kwargs: Any) -> Generator[None, Any, None]:
        places = self._place(source), self._place(target)
        yield
        self._add("exchange" if flag == commit._RENAME_EXCHANGE else "move", 0, *places)

    replace = rename


@contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Record the operations below a folder; existing files count as durable."""
    recording = Recording(folder)
    recorder = _Recorder(recording)
    with ExitStack() as stack:
        for module, name, note in (
            *((os, name, getattr(recorder, name)) for name in OPERATIONS),
            (commit, "_rename", recorder.rename),
        ):
            stand_in = recorder.stand_in(getattr(module, name), note)
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield recording
