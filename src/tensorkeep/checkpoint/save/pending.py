"""What the caller of a background save holds: whether it is over, and its report or error."""

import os

from tensorkeep.checkpoint.save.job import SaveJob, SaveReport
from tensorkeep.errors import UsageError


class PendingSave:
    """A save that runs in the background; returned by `tensorkeep.save_async` and `CheckpointManager.save`.

    Its error is never lost: `wait` raises it, the next save of a manager raises it, and if neither is called, it is
    logged when the interpreter exits.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> pending = tensorkeep.save_async({"w": torch.zeros(1000)}, f"{folder.name}/step-1")
    >>> pending.wait().state_bytes
    4000
    >>> pending.done()
    True
    >>> folder.cleanup()
    """

    def __init__(self, job: SaveJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<PendingSave {self.path!r}: {'over' if self.done() else 'running'}>"

    @property
    def path(self) -> str:
        """Where the checkpoint appears."""
        return self._job.path

    @property
    def report(self) -> SaveReport | None:
        """The report; None while the save runs, and if it failed."""
        return self._job.report

    def done(self) -> bool:
        """Return whether the save is over, successfully or not."""
        return self._job.is_over()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable and visible, at most for ``timeout`` seconds; return the report.

        Raises
        ------
        TimeoutError
            If the save is still running after that time.
        BusyError
            If another process writes to the path, or a later save took the place of this one in a manager's queue.
        DestinationExistsError, StoreError
            If something appeared at the path after the call, or the disk failed. What was there before is intact.
        UsageError
            If another process began the save; a forked child cannot wait for it.
        """
        if os.getpid() != self._job.process:
            raise UsageError("was started by another process", path=self.path, remedy="wait for it there")
        if not self._job.wait(timeout):
            raise TimeoutError(f"{self.path}: the save is still running after {timeout} s")
        return self._job.result()
