"""The commit of a checkpoint in an object store: one conditional request for its manifest."""

import errno
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self, Unpack

import msgspec

from tensorkeep.errors import DestinationExistsError, NotFoundError, StoreError, TensorkeepError
from tensorkeep.paths import StorePath, endpoint, without_secrets
from tensorkeep.storage import store_requests
from tensorkeep.storage.base import MANIFEST_NAME, CommitOptions, PendingCommit
from tensorkeep.storage.clock import clock
from tensorkeep.storage.store_requests import unsafe_server
from tensorkeep.structs import prepared

logger = logging.getLogger(__name__)
# The manifest of a checkpoint that was removed, until its objects are; see `put_tombstone` for further ones.
TOMBSTONE_NAME = "removed.json"
# Objects without a manifest that are older belong to a save that has failed: `prune` deletes them.
LEFTOVER_AGE = timedelta(hours=24)
_ID_IN_NAME = re.compile(r"-([0-9a-f]{16})\.[^/]+\Z")
_TOMBSTONE = re.compile(r"removed(-[0-9a-f]{16})?\.json")
_AGAIN_SECONDS = 0.05
_refusing: set[str] = set()  # endpoints that were seen to refuse the creation of an object that exists


def object_name(name: str, save_id: str) -> str:
    """Return ``model-00001-of-00003-SAVE_ID.safetensors`` for the name ``model-00001-of-00003.safetensors``."""
    # A store has no rename and no lock. The names of a save's objects hold its random id, so that two saves never write
    # the same object. The manifest names them and is written last: a process that is killed at any moment leaves the
    # old checkpoint, or the new one, and objects that no manifest names.
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{save_id}{dot}{suffix}" if save_id else name


def save_of(name: str) -> str | None:
    """Return the id of the save that wrote an object of this name; None if it has none."""
    found = _ID_IN_NAME.search(name)
    return found[1] if found else None


def is_tombstone(name: str) -> bool:
    """Return whether an object of this name holds the manifest of a removed checkpoint."""
    return _TOMBSTONE.fullmatch(name) is not None


def put_tombstone(path: StorePath, manifest: bytes) -> StorePath:
    """Keep the manifest of a checkpoint that is about to be removed; return the path of the tombstone."""
    tombstone = path / TOMBSTONE_NAME
    # A tombstone never replaces another one, because readers may still use the objects that it lists.
    if not store_requests.put_unless_changed(tombstone, manifest, None):
        tombstone = path / object_name(TOMBSTONE_NAME, hashlib.sha256(manifest).hexdigest()[:16])
        store_requests.put(tombstone, manifest)
    return tombstone


class StoreCommit(PendingCommit):
    """A checkpoint that is being written to a store: a context manager that removes it unless it was published.

    ``path`` is the prefix of the new objects; `object_name` makes their names with ``save_id``. The commit removes the
    objects of the replaced checkpoint, and objects of saves that failed a day ago. Other steps may share the objects of
    a step: its old manifest becomes the tombstone, and `prune` removes what no step names.
    """

    is_staged = False

    def __init__(self, destination: StorePath, **options: Unpack[CommitOptions]) -> None:
        super().__init__(destination, **options)
        self._url = destination
        self.save_id = secrets.token_hex(8)
        self._manifest = destination / MANIFEST_NAME
        self._listed: Callable[[Path], Iterable[str]] = options.get("listed", lambda path: ())
        self._is_ours: Callable[[str], bool] = options.get("is_ours", lambda name: True)
        self._seen: store_requests.ObjectStatus | None = None
        self._old: bytes | None = None
        self._replaced: set[str] = set()
        # Our clock, only compared with itself.
        self._begun = clock().time()
        # A forked child must not remove the objects of its parent.
        self._process = os.getpid()
        self._may_appear = False  # whether the store has carried out a request for the manifest, or may still do so

    def __enter__(self) -> Self:
        end = clock().monotonic() + store_requests.give_up_seconds()
        while True:
            try:
                self._look_at_destination(end)
                return self
            except StoreError:
                # Another save may have replaced what was read.
                if self._seen is None or self._is_still(self._seen) or clock().monotonic() > end:
                    raise
                clock().sleep(_AGAIN_SECONDS)

    def _look_at_destination(self, end: float) -> None:
        self._old = self._seen = None
        # The listing and the manifest are two requests: another save may come between them.
        while (found := self._read_back()) is None:
            names = {name for name, _ in store_requests.children(self._url)}
            if MANIFEST_NAME not in names:
                self._check_free(names)
                return
            if clock().monotonic() > end:
                raise StoreError(
                    "lists a manifest that cannot be read",
                    path=self._url,
                    remedy="check the permissions, or save to another path",
                )
            clock().sleep(_AGAIN_SECONDS)  # another save has created it meanwhile
        self._old, self._seen = found
        self._check_replaceable()
        # Other steps may share the objects of a step, so they are not removed here: `prune` removes what no step names.
        if not self._url.is_step:
            self._replaced = set(self._listed(self._url))

    def _is_still(self, seen: store_requests.ObjectStatus) -> bool:
        found = self._read_back()
        return found is not None and found[1].tag == seen.tag

    def _check_free(self, names: Iterable[str]) -> None:
        # Objects with an id are of saves that have not finished, and do not block this one.
        foreign = sorted(name for name in names if save_of(name) is None and name != TOMBSTONE_NAME)
        if foreign:
            raise DestinationExistsError(
                f"holds {foreign[0]!r}, and is not a checkpoint",
                path=self._url,
                remedy="choose another path, or remove that yourself",
            )

    def publish(self, manifest: bytes | None = None) -> None:
        """Make the checkpoint visible by writing its manifest.

        Raises DestinationExistsError if another save was first; UnsupportedError if the server ignores conditions;
        StoreError, which states whether the checkpoint may still become visible.
        """
        assert manifest is not None  # in a store, the manifest is the commit
        content = manifest
        self._check_server(content)
        # Only then may `prune` of another process have taken our objects for leftovers.
        if clock().time() - self._begun > LEFTOVER_AGE.total_seconds():
            self._check_objects(content)
        end = clock().monotonic() + store_requests.give_up_seconds()
        if self._old is not None and self._url.is_step:
            # Before the manifest is replaced: `prune` needs the names in the old one.
            put_tombstone(self._url, self._old)
        while not self._put(content):
            found = self._read_back()
            if found is None:
                self._seen = None  # it was removed, or two requests met and neither won
            elif found[0] == content:
                break  # ours: the answer to an earlier attempt was lost
            elif self._seen is None or found[1].tag != self._seen.tag:
                raise DestinationExistsError(
                    f"another save was first: {_described(*found)}",
                    path=self._url,
                    remedy="choose another path, or save again and overwrite that (overwrite=True)",
                )
            if clock().monotonic() > end:
                raise StoreError(
                    "cannot make the checkpoint visible: the store keeps answering that another request is in its way",
                    path=self._url,
                    remedy="save again, or to another path",
                )
            clock().sleep(_AGAIN_SECONDS)
        self._may_appear = True
        if self._old is not None and not self._url.is_step:
            self._remove(partial(self._needless, content))

    def _check_server(self, content: bytes) -> None:
        own = self._own_names(content)
        if not own or self._url.scheme != "s3" or endpoint() in {"", *_refusing}:
            return
        # Some servers replace the object although asked not to, and saves that race would be lost. One request, for the
        # first save of a process, to a server that the user has named.
        if store_requests.put_unless_changed(self._url / own[0], b"", None):
            problem = f"at {without_secrets(endpoint())} replaces an object although asked not to (If-None-Match)"
            raise unsafe_server(self._url, problem)
        _refusing.add(endpoint())

    def _check_objects(self, content: bytes) -> None:
        own = self._own_names(content)
        # The manifest of several ranks names one fragment per rank, and the fragment names the objects of its rank.
        for name in [name for name in own if name.endswith(".json")]:
            own += self._own_names(store_requests.read(self._url / name)[0])
        missing = {*own} - {name for name, _ in store_requests.children(self._url)}
        if missing:
            raise StoreError(
                f"{min(missing)} was deleted meanwhile: after 24 h, prune takes a save for one that has failed",
                path=self._url,
                remedy="save again, in less time",
            )

    def _own_names(self, content: bytes) -> list[str]:
        # By a pattern, not by a parser: manifests and fragments have different structures, and the id is unique.
        return re.findall(rf'"([^"/]+-{self.save_id}\.[^"/]+)"', content.decode())

    def _put(self, content: bytes) -> bool:
        before, self._may_appear = self._may_appear, True
        try:
            written = store_requests.put_unless_changed(self._manifest, content, self._seen)
        except StoreError as error:
            # The answer may be lost although the store has accepted the manifest.
            with suppress(StoreError):
                found = self._read_back()
                if found is not None and found[0] == content:
                    return True
            # Reading back proves nothing: if the answer was lost, the request may still be on its way.
            if error.errno == errno.EACCES and not before:
                self._may_appear = False
                raise
            raise StoreError(
                f"cannot make the checkpoint visible: {error.message}; "
                "if the store still carries out the request, it becomes visible later",
                path=self._url,
                remedy=error.remedy,
            ) from error
        # The store has refused it, so this request changes nothing.
        if written is False:
            self._may_appear = before
        return bool(written)

    def _read_back(self) -> tuple[bytes, store_requests.ObjectStatus] | None:
        try:
            return store_requests.read(self._manifest)
        except NotFoundError:
            return None

    def _needless(self, content: bytes) -> list[str]:
        written = {name: each.modified for name, each in store_requests.children(self._url) if each and save_of(name)}
        # The clock of the store: the objects of this save are the newest.
        old = {name for name, when in written.items() if when <= max(written.values()) - LEFTOVER_AGE}
        failed = {name for name in old if save_of(name) != self.save_id and self._is_ours(name)}
        return [name for name in sorted(self._replaced | failed) if not _names(content, name)]

    def _remove(self, needless: Callable[[], Iterable[str]]) -> None:
        try:
            store_requests.delete([self._url / name for name in needless() if "/" not in name])
        # The checkpoint is visible already, so the save has succeeded: `prune` or the next replacement removes them.
        except TensorkeepError as error:
            logger.warning("%s: objects that nothing needs remain: %s", self._url, error.message)

    def __exit__(self, *error: object) -> None:
        # A manifest that becomes visible later needs its objects. A forked child has no part in the save.
        if not self._may_appear and os.getpid() == self._process:
            children = partial(store_requests.children, self._url)
            # The listing is made inside `_remove`, which also catches its errors.
            self._remove(lambda: [name for name, _ in children() if save_of(name) == self.save_id])


def _names(manifest: bytes, name: str) -> bool:
    # Whole names only: a name may be the end of another one.
    return any(f'{before}{name}"'.encode() in manifest for before in '"/')


class _Step(msgspec.Struct):
    number: int


class _File(msgspec.Struct):
    name: str


class _Body(msgspec.Struct):
    writer: str = ""
    step: _Step | None = None
    files: list[_File] = []


class _Content(msgspec.Struct):
    body: _Body


def _described(content: bytes, status: store_requests.ObjectStatus) -> str:
    when = f"{status.modified:%Y-%m-%d %H:%M:%S} UTC"
    try:
        body = msgspec.json.decode(content, type=prepared(_Content)).body
    except (msgspec.DecodeError, RecursionError):
        return f"an object that is not a manifest, at {when}"
    words = [f"save {found}" for file in body.files if (found := save_of(file.name))][:1]
    words += [f"of step {body.step.number}"] if body.step else []
    return " ".join([*words, f"by {body.writer or 'another program'}, at {when}"])
