"""A training run on a full disk ends with an error and resumes exactly once space is free."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from tensorkeep.testing.equality import difference
from tensorkeep.train.run.state import Run
from train.tiny_training import CONFIG, Witness, last_state, lines, prepared, run

PAGE = 4096


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)


def fill(disk: Path) -> None:
    """Fill the disk up to the last page."""
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(PAGE))


def elsewhere(place: Path, real: Path) -> None:
    """Mount another disk as a folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    real.mkdir()
    place.symlink_to(real)


def fill_in_step(opened: Run, step: int, disk: Path) -> None:
    """Fill the disk at a step at which nothing is saved."""
    real = opened.batches.at

    def at(position: int) -> Any:
        if opened.progress.step == step:
            opened.manager.wait()
            fill(disk)
        return real(position)

    opened.batches.at = at  # type: ignore[method-assign]


class Waits(Witness):
    """Waits for the pending save at a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        super().on_event(step, kind, values)
        if (step, kind) == (self._step, "train"):
            for thread in threading.enumerate():
                if thread.name == "tensorkeep-save":
                    thread.join()


def same_as_whole(config: Any, folder: Path, data: Path, whole: Path) -> None:
    """Resume a run and compare it with an uninterrupted one."""
    run(config, folder, data, resume=True)
    run(config, whole, data)
    assert lines(folder) == lines(whole)
    assert difference(last_state(folder), last_state(whole)) is None


def test_a_failed_background_save_is_raised_before_the_next_one(
    tmp_path: Path, small_disk: Path, record_property: Any
) -> None:
    data, folder = prepared(tmp_path), tmp_path / "run"
    config = CONFIG.changed({"loop.steps": 40, "checkpoint.every": 10})
    elsewhere(folder / "checkpoints", small_disk / "checkpoints")
    witness = Waits(22)
    with pytest.raises(tensorkeep.StoreError, match="No space left") as raised:
        run(config, folder, data, listener=witness, arrange=partial(fill_in_step, step=15, disk=small_disk))
    assert 20 <= witness.of("train")[-1] <= 22
    assert witness.of("save") == [10]
    assert not hasattr(raised.value, "__notes__"), "it is reported twice"
    (small_disk / "filler").unlink()
    same_as_whole(config, folder, data, tmp_path / "whole")
    record_property("cases", 1)


def test_a_log_on_a_full_disk_ends_the_run(tmp_path: Path, small_disk: Path, record_property: Any) -> None:
    data, folder = prepared(tmp_path), small_disk / "run"
    config = CONFIG.changed({"loop.steps": 60, "checkpoint.every": 5})
    elsewhere(folder / "checkpoints", tmp_path / "checkpoints")
    witness = Witness()
    with pytest.raises(tensorkeep.StoreError, match=r"log\.jsonl: cannot write the log: No space left"):
        run(config, folder, data, listener=witness, arrange=partial(fill_in_step, step=7, disk=small_disk))
    assert witness.of("train")[-1] < 60, "the last page holds a few lines only"
    (small_disk / "filler").unlink()
    same_as_whole(config, folder, data, tmp_path / "whole")
    record_property("cases", 1)
