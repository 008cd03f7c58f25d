"""The random states of all processes of a run, which are saved with it."""

from __future__ import annotations

from typing import Any

import torch

from tensorkeep.train.run.device import RunRandomState
from tensorkeep.train.run.distributed import World


class WorldRandomState(RunRandomState):
    """The random states of all processes of a run: those of the first, and beside them torch's of the others.

    A run that goes on in another number of processes has those of the first only; the others begin anew.

    Parameters
    ----------
    world : World
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """Return the states, as they are now."""
        own = super().state_dict()
        if self._world.size == 1:
            return own
        cuda = own.get("cuda", [])
        found = self._world.gather(torch.cat([own["torch"], *cuda]))
        sizes = [len(each) for each in (own["torch"], *cuda)]
        others = {}
        for rank, each in enumerate(found[1:], start=1):
            states = torch.split(each, sizes)
            others[str(rank)] = {"torch": states[0].clone(), "cuda": [state.clone() for state in states[1:]]}
        return {**own, "others": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of this process, if they were saved."""
        others = state.get("others", {})
        if self._world.leads:
            super().load_state_dict(state)
        elif len(others) + 1 == self._world.size:
            super().load_state_dict({**state, **others[str(self._world.rank)]})
