"""What the tests of all techniques share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run measure what the machine can do at most: that takes longer than the run."""
    for module in ("run.setup", "techniques.mixed_precision"):
        monkeypatch.setattr(f"tensorkeep.train.{module}.measured_peak", lambda device, dtype=None: 1e9)
