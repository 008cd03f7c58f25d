"""What the tests of all techniques share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run measure what the machine can do at most: that takes longer than the run."""
    monkeypatch.setattr("holdfast.train.run.measured_peak", lambda device: 1e9)
