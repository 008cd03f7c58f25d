"""Copies of checkpoints to a store, without a limit of speed."""

from pathlib import Path

from tensorkeep.checkpoint.local_tier.transfer import StoredCopy, Throttle, Transfer, copy_to_store
from tensorkeep.io.parallel import Cancellation
from tensorkeep.paths import StorePath


class Sent:
    """Notes what was sent."""

    def __init__(self) -> None:
        self.bytes = 0
        self.transfer = Transfer(Throttle(None), Cancellation(), self.note)

    def note(self, done: int, total: int) -> None:
        assert done <= total
        self.bytes = done


def copy(source: Path, destination: StorePath, *earlier: StoredCopy, overwrite: bool = False) -> tuple[StoredCopy, int]:
    """Copy a checkpoint to a store; return the copy and the bytes that were sent."""
    sent = Sent()
    return copy_to_store(source, destination, sent.transfer, earlier=earlier, overwrite=overwrite), sent.bytes
