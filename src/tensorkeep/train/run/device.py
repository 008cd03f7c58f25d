"""Where a run computes: its device, and what else of a machine its results depend on, down to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tensorkeep import machine
from tensorkeep.checkpoint.restore.stateful import RandomState
from tensorkeep.errors import UsageError


def chosen_device(name: str) -> torch.device:
    """Return the device of a name; ``"auto"`` is the GPU where there is one.

    Raises
    ------
    UsageError
        If torch cannot compute on such a device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # A device without data, torch's "meta", gives no number back.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # Some go on for pages.
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UsageError(
            f"the device {name!r} cannot be used: {reason}", remedy='give "auto", "cpu" or "cuda"'
        ) from error
    return device


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return what beside its configuration and its data decides the bits of a run: torch, the device, CPU threads."""
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
    else:
        model = machine.processor()["model"]
    return {
        "torch": str(torch.__version__),
        "device": f"{device.type} ({model})",
        "threads": torch.get_num_threads(),
    }


class RunRandomState(RandomState):
    """The random states of a run, which may go on where there are more GPUs, fewer, or none.

    The states of GPUs are set where there are as many of them as before.
    """

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check whether states can be set here."""
        super().check_state_dict(_for_here(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all generators."""
        super().load_state_dict(_for_here(state))


def _for_here(state: Mapping[str, Any]) -> dict[str, Any]:
    fits = len(state.get("cuda", ())) == torch.cuda.device_count()
    return {name: each for name, each in state.items() if name != "cuda" or fits}
