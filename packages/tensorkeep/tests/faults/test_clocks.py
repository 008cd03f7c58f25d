"""Wrong clocks: retention deletes no step that it would keep with a correct clock."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorkeep import CheckpointManager, KeepThinned, UnsupportedError, save
from tensorkeep.formats import checksummed_json

STEPS = 14
INTERVAL = 600.0
START = 1.7e9
YEARS = 10 * 365 * 86_400.0

Wrong = Callable[[int], float]
"""The error of the clock, in seconds, at the save of a step."""

CLOCKS: dict[str, Wrong] = {
    "ahead once": lambda step: YEARS * (step == 9),
    "behind once": lambda step: -YEARS * (step == 9),
    "ahead at the first save": lambda step: YEARS * (step == 1),
    "behind at the first save": lambda step: -START * (step == 1),
    "ahead at the second save": lambda step: YEARS * (step == 2),
    "ahead for good": lambda step: YEARS * (step >= 9),
    "behind for good": lambda step: -YEARS * (step >= 9),
    "ahead for a while": lambda step: YEARS * (9 <= step <= 11),
    "back again and again": lambda step: -86_400.0 * (step // 7),
    "ahead at the last save": lambda step: YEARS * (step == STEPS),
}


def save_all(root: Path, wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Save a run and return the steps that existed after each save."""
    now = [START]
    monkeypatch.setattr(time, "time", lambda: now[0])
    there = []
    rule = KeepThinned((("1h", 0), ("1d", "1h"), ("30d", "1d")))
    with CheckpointManager(root, asynchronous=False, keep=rule) as manager:
        for number in range(1, STEPS + 1):
            now[0] = START + number * INTERVAL + wrong(number)
            manager.save(number, {"step": number})
            there.append([step.number for step in manager.steps()])
    return there


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return the steps that a correct clock leaves after each save; the rule does delete."""
    with pytest.MonkeyPatch.context() as patches:
        found = save_all(tmp_path_factory.mktemp("right"), lambda step: 0.0, patches)
    assert len(found[-1]) < STEPS
    return found


@pytest.mark.parametrize("wrong", CLOCKS.values(), ids=CLOCKS)
def test_a_wrong_clock_deletes_no_step_that_a_correct_clock_keeps(
    tmp_path: Path, wrong: Wrong, right: list[list[int]], monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    found = save_all(tmp_path, wrong, monkeypatch)
    assert [sorted(set(kept) - set(there)) for kept, there in zip(right, found, strict=True)] == [[]] * STEPS
    # Old steps are deleted as well.
    assert found[-1] == right[-1]
    record_property("cases", STEPS)


def test_what_no_reader_would_accept_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 3e11)  # after the year 9999
    with pytest.raises(UnsupportedError, match="look at the number of the step and at the clock"):
        CheckpointManager(tmp_path).save(1, {"step": 1})
    monkeypatch.setattr(checksummed_json, "MAX_BYTES", 1000)
    with pytest.raises(UnsupportedError, match="its structure and plain values take"):
        save({"text": "x" * 1000}, tmp_path / "a")
    assert not list(tmp_path.iterdir())
