"""The warning about training that has become much slower."""

from pathlib import Path
from unittest import TestCase

import pytest
import torch

from chatgot.run.state import ActivityTimer, SlowdownDetector, Speedometer
from chatgot.step import cpu
from chatgot.step.device import data_sheet_peak
from chatgot.step.state import StepState, check_steps
from tiny_training import CONFIG, lines, run


def windows(detector: SlowdownDetector, *seconds: float) -> list[float | None]:
    """Add a window of ten steps for each duration of a step; return what was reported in each window."""
    found = []
    for each in seconds:
        reports = [detector.add(100, each) for _ in range(10)]
        assert reports[:-1] == [None] * 9
        found.append(reports[-1])
    return found


def test_slow_windows_are_reported_and_a_few_slow_steps_are_not() -> None:
    # A fifth of the earlier median is reported once, and nothing before the usual speed is known.
    reports = windows(SlowdownDetector(), 1.0, 1.0, 1.2, 0.8, 4.9, 5.5, 9.0)
    assert reports == [*[None] * 5, pytest.approx(5.5), None]
    assert windows(SlowdownDetector(), 1.0, 1.0, 9.0) == [None, None, None]
    detector = SlowdownDetector()
    windows(detector, 1.0, 1.0, 1.0)
    assert [detector.add(100, seconds) for seconds in (9.0, 9.0, *[1.0] * 8)] == [None] * 10
    # Time that a GPU still took is not a step.
    detector = SlowdownDetector()
    windows(detector, 1.0, 1.0, 1.0)
    assert [detector.add(100, 0.0) for _ in range(9)] == [None] * 9
    assert detector.add(0, 70.0, steps=0) is None
    assert detector.add(100, 0.0) == pytest.approx(7.0)
    # Short steps are compared over seconds.
    detector = SlowdownDetector()
    assert [detector.add(100, 0.0625) for _ in range(240)] == [None] * 240
    assert [detector.add(100, 0.4375) for _ in range(12)] == [*[None] * 11, pytest.approx(7.0)]


def test_a_run_that_slows_down_warns_once(tmp_path: Path, data: Path) -> None:
    elapsed = 0.0

    def with_fake_clock(opened: StepState) -> None:
        real = opened.model.loss

        def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal elapsed
            elapsed += 1.0 if opened.progress.step <= 31 else 7.0
            found: torch.Tensor = real(inputs, targets)
            return found

        opened.model.loss = loss  # type: ignore[method-assign]
        opened.clock = ActivityTimer(lambda: elapsed)

    config = CONFIG.changed({"loop.steps": 51})
    with TestCase().assertLogs("chatgot", "WARNING") as logged:
        run(config, tmp_path / "run", data, arrange=with_fake_clock)
    assert [(line["step"], round(line["ratio"])) for line in lines(tmp_path / "run", "slowdown")] == [(41, 7)]
    (message,) = [each.getMessage() for each in logged.records]
    assert message.startswith("training is 7 times slower than before, at step 41: the load of this machine is ")
    assert "taskset" in message


def test_a_run_on_a_gpu_that_slows_down_warns(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are checked every 11 steps, and take their time then."""
    elapsed = 0.0

    def check(opened: StepState) -> bool:
        nonlocal elapsed
        elapsed += sum(1.0 if each.number <= 33 else 7.0 for each in opened.unchecked)
        return check_steps(opened)

    def with_fake_clock(opened: StepState) -> None:
        opened.clock = ActivityTimer(lambda: elapsed)

    monkeypatch.setattr("chatgot.run.setup.can_check_later", lambda run: True)
    monkeypatch.setattr("chatgot.run.monitor.check_steps", check)
    config = CONFIG.changed({"loop.steps": 55, "log.every": 11})
    run(config, tmp_path / "run", data, arrange=with_fake_clock)
    assert [(line["step"], round(line["ratio"])) for line in lines(tmp_path / "run", "slowdown")] == [(44, 7)]


def test_data_sheets_of_cards_by_the_name_that_torch_gives_and_their_mfu() -> None:
    tera = {"NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 NVL": 835, "NVIDIA GeForce RTX 4090": 165.2}
    tera |= {"NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA A100-SXM4-80GB": 312}
    assert {name: data_sheet_peak(name) for name in tera} == pytest.approx({n: t * 1e12 for n, t in tera.items()})
    for unknown in ("GeForce RTX 3090 Ti", "GeForce RTX 4090 Laptop GPU", "A100-SXM4-80GB MIG 1g.10gb"):
        assert data_sheet_peak(f"NVIDIA {unknown}") is None
    assert data_sheet_peak("AMD EPYC") is None
    speed = Speedometer(500.0, data_sheet=1000.0)
    speed.add(10, 400, 1.0)
    assert speed.lap() == {"tokens_per_second": 10.0, "mfu": 0.8, "mfu_of_data_sheet": 0.4}


def test_teams_that_limit_spinning_are_counted_by_the_usable_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.machine, "usable_processors", lambda: {0, 1, 2})
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    # With one thread, which torch may be set to meanwhile, there is nothing to limit.
    for threads, teams in ((2, 2), (3, 1), (1, 0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with cpu._IdleTeams() as idle:
            assert len(idle._threads) == teams
