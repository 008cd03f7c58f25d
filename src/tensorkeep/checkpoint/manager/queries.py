"""What a manager answers about its steps: which there are, the last one, the best one, those to upload."""

from tensorkeep.checkpoint.manager.folder import StepFolder
from tensorkeep.checkpoint.manager.retention import KeepBest, best_step
from tensorkeep.checkpoint.manager.steps import Step, StepListing, UploadStatus


class StepQueries:
    """The methods of `CheckpointManager` that only read what is known of its steps, and no tensor."""

    _folder: StepFolder
    _best_rule: KeepBest

    def listing(self) -> StepListing:
        """Return the complete steps, and what is wrong with the others."""
        return self._folder.place.listing()

    def steps(self) -> list[Step]:
        """Return the complete steps, by number; a step that is being saved is not among them yet."""
        return self.listing().steps

    def latest(self) -> Step | None:
        """Return the last complete step, or None; a warning names later ones that are incomplete."""
        return next(iter(self._folder.newest_first(stacklevel=2)), None)

    def best(self, metric: str | None = None, mode: str | None = None) -> Step | None:
        """Return the best complete step by a metric, or None if no step has metrics or all values are NaN.

        The metric is by default that of the manager or of ``keep_best``, else the only one that the steps have, or
        their validation loss, or their loss; the mode is that of the manager, or known from the name.

        Raises UsageError if no step has the metric although some have others, if several may be meant, or if the mode
        is not known.
        """
        rule = self._best_rule
        if metric in (None, rule.metric):
            mode = mode or rule.mode
        return best_step(self.steps(), metric or rule.metric, mode)

    def uploads(self) -> list[UploadStatus]:
        """Return the steps that are in ``local`` and not in the store yet, by number.

        What an earlier process has left is among them from the first call on that changes something; see `claim`.
        """
        return self._folder.place.uploads()
