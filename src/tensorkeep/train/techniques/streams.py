"""Streams of a device beside the one that computes; on the CPU ones that do nothing, so that code is the same."""

from __future__ import annotations

from typing import Any

import torch


def stream_of(device: torch.device) -> Any:
    """Return a new stream of a device.

    It is used with ``torch.get_device_module(device)``, whose events and ``stream(...)`` the CPU has, too.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()  # type: ignore[no-untyped-call]
