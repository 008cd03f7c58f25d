"""How much memory training takes."""

from __future__ import annotations

import torch

from tensorkeep.machine import peak_resident_bytes


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
    return peak_resident_bytes()
