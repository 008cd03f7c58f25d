"""How much memory training takes."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use at one moment.

    On a GPU those of its tensors, elsewhere the memory of the process, with all that it has loaded.

    Parameters
    ----------
    device : torch.device
        Where the model is.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # Second choice: it begins with the peak of the process that started this one.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
