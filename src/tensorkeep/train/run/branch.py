"""Branching: a new run that begins with the checkpoint of another one, and its data."""

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from tensorkeep.errors import NotACheckpointError, PathLike, UsageError
from tensorkeep.manager.manager import CheckpointManager
from tensorkeep.runs.address import find_checkpoint
from tensorkeep.runs.backends import place_of
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import is_prepared
from tensorkeep.train.run.data import Meter, check_preparation, open_data
from tensorkeep.train.run.folder import RunFolder, RunRecord


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of a run, its metrics, and the configuration with which its step was computed."""

    folder: RunFolder
    step: int
    metrics: dict[str, float]
    config: Config

    @property
    def record(self) -> RunRecord:
        """The record of the run."""
        return self.folder.record()

    def manager(self, group: ProcessGroup | None) -> CheckpointManager:
        """Return a manager that reads the checkpoints of the run."""
        return CheckpointManager(self.folder.checkpoints, group=group)

    def check_data(self, dataset: Dataset) -> None:
        """Raise UsageError if a dataset has not the tokenizer of the run."""
        if dataset.tokenizer.digest != self.folder.tokenizer().digest:
            raise UsageError(
                f"data.tokenizer: the tokenizer of this data is not that of {self.folder.path}, and the model has the "
                "vocabulary of its tokenizer",
                path=dataset.path,
                remedy="give data of the same tokenizer, or leave --data out for the data of the run",
            )


def branch_point(address: PathLike) -> BranchPoint:
    """Return the checkpoint at the address of a run or one step of it, such as ``run``, ``run@1200`` or ``run@best``.

    Raises NotACheckpointError if it is not a run, or has no such checkpoint; UsageError if the address is malformed.
    """
    folder, wanted = RunFolder.at(address)
    record = folder.record()
    number = find_checkpoint(f"{folder.checkpoints}@{wanted or 'latest'}").step
    if number is None:
        raise NotACheckpointError("holds no checkpoint", path=folder.checkpoints, remedy="resume the run first")
    step = place_of(folder.checkpoints).read(number)
    return BranchPoint(folder, number, dict(step.metrics), record.config_after(number))


def open_branch_data(
    config: Config, folder: RunFolder, point: BranchPoint, given: Collection[str], meter: Meter
) -> Dataset:
    """Return the data of a branch: ``data.source`` if that was given, else that of the run that it branches from.

    Data that was prepared within the folder of that run is copied, so that the branch does not need it later.

    Raises UsageError if the data has another tokenizer, or was prepared by other settings than those that are given;
    and the errors of `open_data`.
    """
    if "data.source" in given:
        dataset = open_data(config, folder, given=given, meter=meter)
        point.check_data(dataset)
        return dataset
    check_preparation(config, given, point.config, point.folder.path)
    dataset = open_data(point.config, point.folder, resume=True, meter=meter)
    inside = Path(os.path.abspath(dataset.path)).is_relative_to(point.folder.path)
    return Dataset.open(_copied(dataset.path, folder.data)) if inside else dataset


def _copied(source: Path, destination: Path) -> Path:
    """Copy a folder of prepared data; it appears when it is complete."""
    with Commit(destination, directory=True, overwrite=True, replaceable=is_prepared) as commit:
        with store_errors(destination, "copy the data"):
            for file in source.iterdir():
                with file.open("rb") as reading, (commit.path / file.name).open("xb") as writing:
                    shutil.copyfileobj(reading, writing, 1 << 20)
                    writing.flush()
                    os.fsync(writing.fileno())
        commit.publish()
    return destination
