"""The folder of a training run as those see it who read it: which steps are there, and what they hold."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.arguments import checked_path
from tensorkeep.checkpoint.manager.retention import KeepBest
from tensorkeep.checkpoint.manager.steps import Step, Survey, step_path, survey
from tensorkeep.checkpoint.restore.restore import restore_state
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike
from tensorkeep.io.parallel import Progress

if TYPE_CHECKING:
    import torch


class StepFolder:
    """Finds and restores steps; see `CheckpointManager`, which also writes them."""

    _budget: int | None = None
    """Bytes that all buffers together may take."""

    def __init__(self, root: PathLike, best_rule: KeepBest) -> None:
        self.root = Path(os.path.abspath(checked_path(root)))
        self._best_rule = best_rule

    def _settle(self) -> None:
        """Let what this process is writing become visible."""

    def _restored(self, step: Path) -> None:
        """Learn which step was restored."""

    def _passed_over(self, step: Path) -> None:
        """Learn which step turned out to be damaged."""

    def survey(self) -> Survey:
        """Look at all steps: those that are whole, and what is wrong with the others."""
        return survey(self.root)

    def steps(self) -> list[Step]:
        """Return the steps that are whole, by number; what is being saved is not among them yet."""
        return self.survey().steps

    def latest(self) -> Step | None:
        """Return the last step that is whole, or None; steps that are not are passed over with a warning."""
        found = self.survey()
        _say_passed_over(found, stacklevel=3)
        return found.steps[-1] if found.steps else None

    def best(self, metric: str | None = None, mode: str | None = None) -> Step | None:
        """Return the best step that is whole, by a metric, or None if no step has it.

        Parameters
        ----------
        metric : str, optional
            As the manager's ``keep_best`` says, or the only one that the steps have, unless given.
        mode : str, optional
            ``"min"`` or ``"max"``; as the manager's ``keep_best`` says, or ``"min"``.
        """
        rule = replace(
            self._best_rule,
            metric=self._best_rule.metric if metric is None else metric,
            mode=self._best_rule.mode if mode is None else mode,
        )
        return next(iter(rule.ranked(self.steps())), None)

    def restore(
        self,
        step: int | Step | None = None,
        into: Any = None,
        *,
        select: str | Iterable[str] | None = None,
        device: torch.device | str | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Load a step, by default the last one that is whole and undamaged.

        Parameters
        ----------
        step : int or Step, optional
            Which one. If it is not given, a step that turns out to be damaged is passed over with a warning.
        into : nested state, optional
            As for `tensorkeep.load`, and objects with a ``load_state_dict()`` are given theirs. What is missing, extra
            or of another shape is named before anything is touched.
        select : str or list of str, optional
            As for `tensorkeep.load`: names, or globs, of what is restored; with ``into`` all else stays as it is.
        device : torch.device or str, optional
            Where new tensors go.
        threads : int, optional
            Reading threads.
        progress : callable, optional
            Called with (bytes done, bytes in all).

        Returns
        -------
        state
            The state; with ``into``, with the very objects that were given.

        Raises
        ------
        NotACheckpointError
            If there is no such step, or none at all.
        CorruptCheckpointError
            If the step that was asked for is damaged, or all are; tensors in ``into`` may be overwritten in part.
        StateMismatchError
            If ``into`` does not fit. Nothing was touched, unless the message says otherwise: an object may refuse its
            state only when it is given it, and a damaged step that was passed over may have been begun.
        """
        self._settle()

        def restored(path: Path) -> Any:
            found = restore_state(
                path,
                into=into,
                select=select,
                device=device,
                threads=threads,
                progress=progress,
                memory_budget=self._budget,
            )
            if select is None:
                self._restored(path)
            return found

        if step is not None:
            return restored(step_path(self.root, step.number if isinstance(step, Step) else step))
        damaged: CorruptCheckpointError | None = None
        for path in self._newest_first():
            try:
                return restored(path)
            except CorruptCheckpointError as error:
                damaged = damaged or error
                self._passed_over(path)
                warnings.warn(f"{path.name} is passed over: {error}", stacklevel=2)
            except NotACheckpointError:
                continue  # its writer has deleted it since
        raise damaged or NotACheckpointError(
            "holds no step", path=self.root, remedy="check the folder, or start from the beginning"
        )

    def _newest_first(self) -> list[Path]:
        found = self.survey()
        _say_passed_over(found, stacklevel=4)
        return [Path(each.path) for each in reversed(found.steps)]


def _say_passed_over(found: Survey, *, stacklevel: int) -> None:
    """Warn of steps that are not whole and later than the last one that is."""
    last = found.steps[-1].number if found.steps else -1
    for number, error in found.broken.items():
        if number > last:
            warnings.warn(f"step {number} is passed over: {error}", stacklevel=stacklevel)
