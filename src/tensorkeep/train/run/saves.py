"""The checkpoints that a run has begun to save in the background, and that are to be told of once they are durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.save.pending import PendingSave
from tensorkeep.checkpoint.save.save import SaveReport


class Saves:
    """Saves steps of a run, and says later which of them are durable, in the order in which they were begun.

    Parameters
    ----------
    manager : CheckpointManager
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._begun: deque[tuple[int, PendingSave]] = deque()

    def begin(self, step: int, state: object, metrics: Mapping[str, float]) -> None:
        """Begin to save a step; see `CheckpointManager.save` for the errors."""
        # A step that was damaged and passed over is done again.
        self._begun.append((step, self._manager.save(step, state, metrics, overwrite=True)))

    def ended(self) -> Iterator[tuple[int, SaveReport]]:
        """Yield each step that has become durable since the last call, without waiting for any.

        Raises
        ------
        StoreError
            If one could not be saved.
        """
        while self._begun and self._begun[0][1].done():
            step, pending = self._begun.popleft()
            yield step, pending.wait()
