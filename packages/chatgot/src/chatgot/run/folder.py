"""The folder of a run, and its record ``run.json``."""

import os
import secrets
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from chatgot.config.config import RENAMED, Config, with_current_names
from chatgot.data.dataset import Dataset, FileStatus
from chatgot.data.tokenizers.base import Tokenizer
from chatgot.data.tokenizers.registry import tokenizer_from_dict
from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    NotFoundError,
    PathLike,
    UsageError,
)
from tensorkeep.ext import absolute, checked_path, machine, prepared
from tensorkeep.ext.checkpoint import CHECKPOINTS, RECORD, backend_of, split_address
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import LocalDirectory, replace_file, store_error

# Values that differ, by name: the value then, and the value now.
Changes = dict[str, tuple[Any, Any]]

TOKENIZER = "tokenizer.json"
LOG = "log.jsonl"
DATA = "data"
# The metric that is saved with a checkpoint, and chooses the best one.
METRIC = "validation_loss"
# The file with the number of the first checkpoint of a run that has no record yet.
_STARTING = "starting"


class DataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a run started with; see `chatgot.data.dataset.Dataset`."""

    fingerprint: str
    # Absolute, or ``"data"`` if it was prepared within the run's folder, so that both can move together.
    path: str = DATA
    description: dict[str, Any] = msgspec.field(name="about", default_factory=dict)
    # Files that still have this status need not be verified when the run resumes.
    verified: dict[str, FileStatus] = {}


class GitState(msgspec.Struct, frozen=True, kw_only=True):
    commit: str
    changed: bool


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a run after a step that computes with changed settings; ``config`` has all settings."""

    step: int
    time: str
    # The changed settings.
    settings: Changes
    config: Config


class BranchOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The run and the step that a run was branched from, when that run was started, and the changed settings."""

    # This path need not exist any more: a branch has its own copy of the checkpoint and the data.
    run: str
    step: int
    started: str
    settings: Changes


class InitialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where the initial weights of a run came from: ``"run"`` or ``"hugging-face"``, and the absolute path."""

    path: str
    kind: str
    # The xxh3-64 of all weights.
    fingerprint: str
    step: int | None = None


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """One resume of a run: after which step, when, and the differences from the start of its segment."""

    step: int
    time: str
    settings: Changes
    # Compared with the start of the run. The file has the earlier name.
    numerics_environment: Changes = msgspec.field(name="surroundings")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``run.json``: the start of a run, its later segments, and each resume."""

    config: Config
    data: DataRecord
    initial: InitialRecord | None = None
    # In ISO 8601.
    started: str = ""
    # 16 hexadecimal digits that the run keeps when it resumes, also in another place: its name for trackers.
    identity: str = ""
    git: GitState | None = None
    # What `tensorkeep.machine.describe` returns.
    environment: dict[str, Any] = {}  # msgspec copies it for each instance
    # What `chatgot.step.device.numerics_environment` returns. The file keeps the earlier names.
    numerics_environment: dict[str, Any] = msgspec.field(name="surroundings", default_factory=dict)
    origin: BranchOrigin | None = None
    segments: list[Segment] = msgspec.field(name="legs", default_factory=list)
    resumed: list[Resumption] = []

    @property
    def last_config(self) -> Config:
        return self.segments[-1].config if self.segments else self.config

    def config_after(self, step: int) -> Config:
        return next((each.config for each in reversed(self.segments) if each.step < step), self.config)


class RunFolder:
    """A run on disk.

    ``run.json`` is its `RunRecord`. ``tokenizer.json`` is the data's tokenizer, so that text can be generated without
    the data. ``log.jsonl`` has a line for each logged step. ``checkpoints/`` is the folder of a `CheckpointManager`.
    ``data/`` is the prepared data, if it was prepared for this run. The folder need not exist.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = absolute(checked_path(path))
        self.log = self.path / LOG
        self.checkpoints = self.path / CHECKPOINTS
        self.data = self.path / DATA
        self._record: RunRecord | None = None

    @classmethod
    def at(cls, address: PathLike) -> "tuple[RunFolder, str | None]":
        """Return the run at the address of its folder, its checkpoints or one step, and the step."""
        place, step = split_address(address)
        folder = cls(place)
        if not folder.exists() and folder.path.name == CHECKPOINTS:
            folder = cls(folder.path.parent)
        return folder, step

    def exists(self) -> bool:
        return (self.path / RECORD).exists()

    def check_new(self) -> None:
        """Raise DestinationExistsError if a run was started here, or its checkpoints are still here."""
        if self.exists():
            raise DestinationExistsError(
                "holds a run already", path=self.path, remedy="resume it with --resume, or choose another --out"
            )
        # A first checkpoint without the rest of its run is replaced; see `unfinished_start`.
        if backend_of(self.checkpoints).numbers() and self.unfinished_start() is None:
            raise DestinationExistsError(
                f"holds the checkpoints of a run without its {RECORD}",
                path=self.path,
                remedy="choose another --out, or move them elsewhere",
            )

    def begin_start(self, step: int) -> None:
        """Note that a new run begins with a checkpoint, which is saved before its record; StoreError if refused."""
        self.path.mkdir(parents=True, exist_ok=True)
        # Before the checkpoint: if the process is killed between the two, the next start knows what it may replace.
        replace_file(self.path / _STARTING, b"%d\n" % step)

    def unfinished_start(self) -> int | None:
        """Return the step of the first checkpoint, if a run was killed before it had its record; else None."""
        if self.exists():
            return None
        try:
            step = int((self.path / _STARTING).read_bytes())
        except (OSError, ValueError):
            return None
        # A run that went further is not replaced, whatever became of its record.
        return step if backend_of(self.checkpoints).numbers() == [step] else None

    def record(self) -> RunRecord:
        """Return the record, read once; NotACheckpointError if there is no run, CorruptCheckpointError if damaged."""
        if self._record is None:
            self._record = self._read_record()
        return self._record

    def _read_record(self) -> RunRecord:
        path = self.path / RECORD
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            kind = NotACheckpointError if self.path.exists() else NotFoundError
            raise kind(
                "holds no run", path=self.path, remedy="give the folder that tensorkeep train wrote (--out)"
            ) from error
        except OSError as error:
            raise store_error(error, path, "read the run") from error
        try:
            values = msgspec.json.decode(content)
            # Runs that were started before the setting existed evaluate all tokens.
            values["config"]["eval"].setdefault("tokens", None)
            record = msgspec.convert(_with_current_names(values), prepared(RunRecord), strict=False)
        except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"is damaged ({error})", path=path) from error
        if record.identity:
            return record
        # Without an identity, as in earlier versions; it is stored when the run resumes.
        start = [record.config.as_dict(), record.data.fingerprint, record.started, record.environment]
        # Sorted, so that the identity does not depend on the order of keys.
        identity = checksummed_json.digest(msgspec.json.encode(start, order="sorted"))
        return msgspec.structs.replace(record, identity=identity)

    def start(
        self,
        config: Config,
        dataset: Dataset,
        numerics_environment: dict[str, Any],
        origin: BranchOrigin | None = None,
        initial: InitialRecord | None = None,
    ) -> None:
        """Write the record and the tokenizer of a new run; StoreError if the operating system refuses."""
        self.path.mkdir(parents=True, exist_ok=True)
        place = Path(os.path.abspath(dataset.path))
        record = RunRecord(
            config=config,
            data=DataRecord(
                path=DATA if place == self.data else str(place),
                fingerprint=dataset.fingerprint,
                description=dataset.description,
                verified=dataset.verified,
            ),
            initial=initial,
            started=now(),
            identity=secrets.token_hex(8),
            git=_git(),
            environment=dict(machine.describe(self.path)),
            numerics_environment=numerics_environment,
            origin=origin,
        )
        # Before the record: a run that exists has its tokenizer.
        replace_file(self.path / TOKENIZER, checksummed_json.seal(dataset.tokenizer.as_dict()))
        # Last: the run exists once its record does.
        self._write_record(record)
        # The record is durable, and the marker no longer means anything; a marker that a crash leaves is ignored.
        (self.path / _STARTING).unlink(missing_ok=True)

    def add_resumption(
        self,
        step: int,
        settings: Changes,
        environment: Changes,
        verified: dict[str, FileStatus],
        segments: list[Segment],
    ) -> None:
        """Add a resume, the segments, and the status of verified data; StoreError if the operating system refuses."""
        # Read again: another process may have resumed and ended the run since this one read the record.
        record = self._read_record()
        entry = Resumption(step=step, time=now(), settings=settings, numerics_environment=environment)
        # A file of tokens with an unchanged status is not read again at the next resume.
        data = msgspec.structs.replace(record.data, verified=verified or record.data.verified)
        self._write_record(
            msgspec.structs.replace(record, resumed=[*record.resumed, entry], segments=segments, data=data)
        )

    def _write_record(self, record: RunRecord) -> None:
        # Replaced atomically: a run without a readable record would be lost.
        replace_file(self.path / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        self._record = record

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; NotACheckpointError or CorruptCheckpointError if it is missing or damaged."""
        with LocalDirectory(self.path) as directory:
            return tokenizer_from_dict(checksummed_json.read(directory, TOKENIZER))

    def check_data(self, dataset: Dataset) -> None:
        """Raise UsageError if a dataset is not the one that the run started with."""
        if self.record().data.fingerprint != dataset.fingerprint:
            raise UsageError(
                f"the data in {dataset.path} has changed since the run began",
                path=self.path,
                remedy="give the folder of the same data (--data), prepare it again, or start a new run in another "
                "--out",
            )


def _with_current_names(values: dict[str, Any]) -> dict[str, Any]:
    for table in (values, *values.get("legs", ())):
        table["config"] = with_current_names(table["config"])
    origin = [values["origin"]] if values.get("origin") else []
    for table in (*origin, *values.get("legs", ()), *values.get("resumed", ())):
        table["settings"] = {RENAMED.get(name, name): change for name, change in table["settings"].items()}
    return values


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git() -> GitState | None:
    commands = ("git", "rev-parse", "HEAD"), ("git", "status", "--porcelain")
    try:
        commit, changes = (
            subprocess.run(each, capture_output=True, check=True, timeout=10).stdout for each in commands
        )
    except (OSError, subprocess.SubprocessError):
        # No git, or no repository here.
        return None
    return GitState(commit=commit.decode().strip(), changed=bool(changes.strip()))
