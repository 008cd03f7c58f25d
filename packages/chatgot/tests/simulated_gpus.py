"""Fixtures for tests that check techniques on a CPU and on GPUs that are not there."""

import pytest
import torch

from chatgot.techniques import base, mixed_precision
from chatgot.techniques.base import Machine

FASTER_IN_16_BITS = {torch.float32: 1e9, torch.bfloat16: 2e9, torch.float16: 2e9}


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "measured_peak", lambda device, dtype=torch.float32: FASTER_IN_16_BITS[dtype])


@pytest.fixture(params=["cpu", "ampere", "hopper"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine; the GPUs exist only for those who ask for their properties."""
    if request.param == "cpu":
        return Machine(torch.device("cpu"))
    capability = {"ampere": (8, 0), "hopper": (9, 0)}[request.param]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"simulated {request.param}")
    # Triton comes with torch for CUDA only.
    monkeypatch.setattr(base, "find_spec", lambda module: object())
    return Machine(torch.device("cuda"))
