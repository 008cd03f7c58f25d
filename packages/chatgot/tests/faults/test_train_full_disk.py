"""A training run on a full disk ends with an error and resumes exactly once space is free."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from chatgot.step.state import StepState
from fault_cases import fill
from tiny_training import CONFIG, Witness, check_same, prepared, run

pytestmark = pytest.mark.integration

LONG = CONFIG.changed({"loop.steps": 40, "checkpoint.every": 10})


@pytest.fixture(scope="module", autouse=True)
def quick_peak() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("chatgot.run.setup.measured_peak", lambda device: 1e9)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path) -> Path:
    """Return the folder of an uninterrupted run."""
    run(LONG, data.with_name("whole"), data)
    return data.with_name("whole")


def elsewhere(place: Path, real: Path) -> None:
    """Mount another disk as a folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    real.mkdir()
    place.symlink_to(real)


def fill_in_step(opened: StepState, step: int, disk: Path) -> None:
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


def check_resumes(folder: Path, data: Path, whole: Path) -> None:
    """Resume a run and compare it with an uninterrupted one."""
    run(LONG, folder, data, resume=True)
    check_same(folder, whole)


def test_a_failed_background_save_is_raised_before_the_next_one(
    tmp_path: Path, small_disk: Path, data: Path, whole: Path, record_property: Any
) -> None:
    folder = tmp_path / "run"
    elsewhere(folder / "checkpoints", small_disk / "checkpoints")
    witness = Waits(22)
    with pytest.raises(tensorkeep.StoreError, match="No space left") as raised:
        run(LONG, folder, data, listener=witness, arrange=partial(fill_in_step, step=15, disk=small_disk))
    assert 20 <= witness.of("train")[-1] <= 22
    assert witness.of("save") == [10]
    assert not hasattr(raised.value, "__notes__"), "it is reported twice"
    (small_disk / "filler").unlink()
    check_resumes(folder, data, whole)
    record_property("cases", 1)


def test_a_log_without_space(tmp_path: Path, small_disk: Path, data: Path, whole: Path, record_property: Any) -> None:
    folder, witness = small_disk / "run", Witness()
    elsewhere(folder / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(tensorkeep.StoreError, match=r"log\.jsonl: cannot write the log: No space left"):
        run(LONG, folder, data, listener=witness, arrange=partial(fill_in_step, step=11, disk=small_disk))
    assert witness.of("train")[-1] < 40, "the last page holds a few lines only"
    (small_disk / "filler").unlink()
    check_resumes(folder, data, whole)
    record_property("cases", 1)
