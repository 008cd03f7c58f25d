"""The folder of a run: what it was started with, its log, its checkpoints; and opening it again."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tensorkeep import machine
from tensorkeep.checkpoint.manager.steps import numbers_in
from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, NotACheckpointError, PathLike, UsageError
from tensorkeep.formats import sealed
from tensorkeep.io.commit import Commit
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import store_error, write_small
from tensorkeep.train.config.config import TECHNIQUES, Config, differences
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.data.tokenizers.known import tokenizer_from_dict
from tensorkeep.train.techniques.parallel import TOGETHER

Changes = dict[str, tuple[Any, Any]]
"""What differs, by name: as it was, and as it is."""

ABOUT = "run.json"
TOKENIZER = "tokenizer.json"
LOG = "log.jsonl"
CHECKPOINTS = "checkpoints"
DATA = "data"

_MAY_CHANGE = (
    *("log.", "sample.", "checkpoint.", "loop.on_divergence", "loop.device", "loop.threads", "data.source"),
    *(f"{TECHNIQUES}{name}" for name in TOGETHER),
)
"""Settings that do not touch what a run computes, as long as all goes well: not on the same machine, at least."""


class RunFolder:
    """A run on disk.

    ``run.json`` says what it was started with: configuration, data, environment, and the state of the git repository
    around. ``tokenizer.json`` is the data's tokenizer, so that the run stands alone. ``log.jsonl`` has a line for each
    logged step. ``checkpoints/`` is the folder of a `CheckpointManager`. ``data/`` is the prepared data, where it was
    prepared for this run. Each time that the run goes on, ``run.json`` is told what is different then.

    Parameters
    ----------
    path : path-like
        It need not exist.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(os.path.abspath(path))
        self.log = self.path / LOG
        self.checkpoints = self.path / CHECKPOINTS
        self.data = self.path / DATA

    def exists(self) -> bool:
        """Say whether a run was started here."""
        return (self.path / ABOUT).exists()

    def check_new(self) -> None:
        """Raise DestinationExistsError if a run was started here, or its checkpoints are here still."""
        if self.exists():
            raise DestinationExistsError(
                "holds a run already", path=self.path, remedy="go on with it by --resume, or choose another --out"
            )
        if numbers_in(self.checkpoints):
            raise DestinationExistsError(
                f"holds the checkpoints of a run without its {ABOUT}",
                path=self.path,
                remedy="choose another --out, or move them elsewhere",
            )

    def start(self, config: Config, dataset: Dataset, surroundings: dict[str, Any]) -> None:
        """Write down what a run starts with.

        Parameters
        ----------
        config : Config
        dataset : Dataset
        surroundings : dict
            See `tensorkeep.train.run.device.surroundings`.

        Raises
        ------
        StoreError
            If the operating system refuses.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        place = Path(os.path.abspath(dataset.path))
        about: dict[str, Any] = {
            "config": config.as_dict(),
            "data": {
                # What was prepared here moves with the folder.
                "path": DATA if place == self.data else str(place),
                "fingerprint": dataset.fingerprint,
                "about": dataset.about,
            },
            "started": _now(),
            "git": _git(),
            "environment": machine.describe(self.path),
            "surroundings": surroundings,
            "resumed": [],
        }
        self._write(TOKENIZER, sealed.seal(dataset.tokenizer.as_dict()))
        # Last: with it the run is there.
        self._write_about(about)

    def note_resumed(self, step: int, settings: Changes, surroundings: Changes) -> None:
        """Write down that the run goes on, and what is not as it was when it began.

        Parameters
        ----------
        step : int
            After which it goes on.
        settings, surroundings : dict of str to tuple
            What differs: as it was, and as it is.

        Raises
        ------
        StoreError
            If the operating system refuses.
        """
        about = self.about()
        entry = {"step": step, "time": _now(), "settings": settings, "surroundings": surroundings}
        self._write_about({**about, "resumed": [*about.get("resumed", []), entry]})

    def _write_about(self, about: dict[str, Any]) -> None:
        self._write(ABOUT, json.dumps(about, indent=1).encode() + b"\n")

    def _write(self, name: str, content: bytes) -> None:
        with Commit(self.path / name, directory=False, overwrite=True, replaceable=lambda path: True) as commit:
            write_small(commit.path, content)
            commit.publish()

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run's data.

        Raises
        ------
        NotACheckpointError, CorruptCheckpointError
            If it is missing or damaged.
        """
        with Directory(self.path) as directory:
            return tokenizer_from_dict(sealed.read(directory, TOKENIZER))

    def about(self) -> dict[str, Any]:
        """Return what ``run.json`` says.

        Raises
        ------
        NotACheckpointError
            If there is no run.
        CorruptCheckpointError
            If the file is damaged.
        """
        path = self.path / ABOUT
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
                raise ValueError("it is no description of a run")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotACheckpointError(
                "holds no run", path=self.path, remedy="give the folder that tensorkeep train wrote (--out)"
            ) from error
        except OSError as error:
            raise store_error(error, path, "read the run") from error
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"is damaged ({error})", path=path) from error
        return found

    def config(self) -> Config:
        """Return the configuration that the run was started with; see `about` for the errors."""
        try:
            return Config.from_dict(self.about().get("config"))
        except UsageError as error:
            raise CorruptCheckpointError(f"is damaged ({error.message})", path=self.path / ABOUT) from error

    def check_data(self, dataset: Dataset) -> None:
        """Raise UsageError unless data is what the run began with."""
        if self.about()["data"].get("fingerprint") != dataset.fingerprint:
            raise UsageError(
                f"the data in {dataset.path} has changed since the run began",
                path=self.path,
                remedy="say by --data where the same data is, prepare it again, or start a new run in another --out",
            )

    def changed_settings(self, config: Config) -> Changes:
        """Return the settings that differ from those that the run began with: as they were, and as they are.

        Raises
        ------
        UsageError
            If one of them decides what the run computes.
        """
        found = differences(self.config(), config)
        told = [
            f"{name}: {before!r} there, {now!r} now"
            for name, (before, now) in found.items()
            if not name.startswith(_MAY_CHANGE)
        ]
        if told:
            raise UsageError(
                f"was started with another configuration: {'; '.join(told)}",
                path=self.path,
                remedy="leave the settings out to go on with those of the run, or start a new run in another --out",
            )
        return found

    def changed_surroundings(self, now: dict[str, Any]) -> Changes:
        """Return how the `tensorkeep.train.run.device.surroundings` of now differ from those in which the run began."""
        began = self.about().get("surroundings", {})
        return {name: (began[name], each) for name, each in now.items() if name in began and began[name] != each}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git() -> dict[str, Any] | None:
    """Return the commit of the repository around, and whether files differ from it; None where there is none."""
    try:
        commit = _output_of("git", "rev-parse", "HEAD")
        return {"commit": commit.strip(), "changed": bool(_output_of("git", "status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _output_of(*command: str) -> str:
    # Names of files need not be text.
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=10).stdout
