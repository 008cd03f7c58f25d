"""The measured peak memory of training."""

import torch

from tensorkeep.machine import peak_resident_bytes


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that was in use.

    On a GPU this is the memory of its tensors, on a CPU that of the whole process.

    Parameters
    ----------
    device : torch.device
        The device of the model.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
