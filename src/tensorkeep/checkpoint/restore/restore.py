"""Putting a whole training state back: tensors in place, objects by their ``load_state_dict``, all checked first."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.arguments import budget_pool, check_device, thread_count
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.checkpoint.load.filling import structure_of
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.load.plan import Plan
from tensorkeep.checkpoint.restore.containers import at
from tensorkeep.checkpoint.restore.match import Fit
from tensorkeep.checkpoint.restore.object_checks import REFUSALS, is_module
from tensorkeep.checkpoint.restore.stateful import Held, hold, plain, put_back
from tensorkeep.checkpoint.restore.structure import below
from tensorkeep.errors import StateMismatchError
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.io.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.io.parallel import Progress
from tensorkeep.state import names
from tensorkeep.state.tree import prune, state_leaves, unflatten

if TYPE_CHECKING:
    import torch


def restore_state(
    path: Path,
    *,
    into: Any,
    select: str | Iterable[str] | None = None,
    device: torch.device | str | None,
    threads: int | None,
    progress: Progress | None,
    memory_budget: int | None = None,
) -> Any:
    """Load a checkpoint, into tensors and objects if they are given.

    First everything is compared. Then the objects of which nothing is filled in place (schedulers, scalers, an
    optimizer that is new) are given their states; if one refuses, they are given back what they had. Only then are the
    tensors of modules and of the other objects overwritten.

    Parameters
    ----------
    into : nested state, optional
        Tensors, arrays and objects with a ``load_state_dict()``, under the keys of the checkpoint. Plain values may be
        anything: the saved ones are returned. An object with a ``check_state_dict(state)`` is asked by it before
        anything is touched: it is given its saved state with tensors that have a shape and a dtype but no data, and
        raises an error to refuse it. Without one, an object's tensors must have the shapes that were saved, but for
        those that it does not have yet.
    select : str or list of str, optional
        Globs on the names of tensors, and of objects that have none (``"scheduler"``, ``"scheduler.*"``); only these
        are restored. ``into`` may then hold more, which is left as it is, and less than the checkpoint. Of a module
        some tensors may be selected, of other objects all or none. Plain values are always returned as they were saved.
    device : torch.device or str, optional
        Where new tensors go.
    memory_budget : int, optional
        Bytes that all buffers together may take.

    Returns
    -------
    state
        As it was saved, with the very objects, tensors and arrays that were given; with ``select`` without what was not
        selected, as `tensorkeep.load` returns it.

    Raises
    ------
    StateMismatchError
        If ``into`` does not fit; nothing was touched. If only an object whose tensors were filled in place, or that is
        given its state after them, refuses it: the message says so, and the tensors are those of the checkpoint.
    CorruptCheckpointError
        If a byte is not what was written. Tensors and objects may then be those of the checkpoint in part; restoring
        another step of the same state replaces all of them.
    UsageError
        If nothing matches a pattern of ``select``, or some, but not all tensors of an object other than a module.
    """
    budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
    if into is None:
        return load(path, select=select, device=device, threads=threads, progress=progress, memory_budget=budget)
    count = thread_count(threads)
    check_device(device)
    with (
        budget_pool(budget) as pool,
        open_reader(path, OpenSettings(pool=pool), "native") as reader,
    ):
        return _Restoring(reader, into, select, device).run(count, pool, progress)


class _Restoring:
    """A state and the checkpoint that it is restored from, once it is known to fit."""

    def __init__(
        self, reader: Reader, into: Any, select: str | Iterable[str] | None, device: torch.device | str | None
    ) -> None:
        self._reader = reader
        self._partial = select is not None
        self._state = hold(into)
        self._fit = Fit(reader, self._state, select)
        targets = self._fit.targets()
        self._first = self._fit.first()
        self._settled = set(self._fit.left)
        before = set[str]().union(*self._first.values())
        self._before = self._plan([name for name in self._fit.chosen if name in before], {}, device)
        self._after = self._plan([name for name in self._fit.chosen if name not in before], targets, device)

    def _plan(self, chosen: list[str], targets: Any, device: torch.device | str | None) -> Plan:
        return Plan(self._reader, self._fit.specs, chosen, targets, device)

    def run(self, threads: int, pool: BufferPool, progress: Progress | None) -> Any:
        """Restore; return the state."""
        total = self._before.nbytes + self._after.nbytes
        self._before.read(threads, pool, _within(progress, 0, total))
        values = self._values(self._before)
        self._give_first(self._rebuilt(self._reader.flat.skeleton, {**self._fit.markers, **values}))
        self._after.read(threads, pool, _within(progress, self._before.nbytes, total))
        values |= self._values(self._after)
        skeleton = self._reader.flat.skeleton
        if self._partial:
            skeleton = prune(skeleton, values.keys())
        return put_back(self._state, self._rebuilt(skeleton, values), self._give_after)

    def _values(self, plan: Plan) -> dict[str, Any]:
        """Return what was read; numpy's scalars, which nothing is filled into, as such."""
        scalars = {name for name in self._fit.new if self._fit.specs[name].kind == "npscalar"}
        return {name: value[()] if name in scalars else value for name, value in plan.values().items()}

    def _rebuilt(self, skeleton: object, values: dict[str, Any]) -> Any:
        with structure_of(self._reader.path):
            return unflatten(skeleton, values, as_is=True, path=self._reader.path)

    def _give_first(self, loaded: Any) -> None:
        """Give their states to the objects that come first; if one refuses, give all of them what they had."""
        had: list[tuple[tuple[Any, ...], Held, Any]] = []
        try:
            for path in self._first:
                held = self._fit.held(path)
                had.append((path, held, _copied(held)))
                put_back(held, at(loaded, path), self._give_before, path)
        except BaseException:
            for path, held, state in had:
                with suppress(Exception):
                    put_back(held, state, _give, path)
            raise
        self._settled |= set(self._first)

    def _give_before(self, path: names.Path, held: Held, state: Any) -> None:
        self._give(path, held, state, "nothing was touched")

    def _give_after(self, path: names.Path, held: Held, state: Any) -> None:
        if not below(path, self._settled):
            self._give(path, held, state, "the tensors of the state are overwritten already")

    def _give(self, path: names.Path, held: Held, state: Any, touched: str) -> None:
        try:
            if self._partial and is_module(held.value):
                held.value.load_state_dict(state, strict=False)
            else:
                _give(path, held, state)
        except REFUSALS as error:
            raise StateMismatchError(
                f"the {type(held.value).__name__} at {names.display(path)!r} does not take its saved state: {error}; "
                + touched,
                path=self._reader.path,
                remedy="restore into an object that was made in the same way",
                different=(names.display(path),),
            ) from error


def _give(path: names.Path, held: Held, state: Any) -> None:
    held.value.load_state_dict(state)


def _copied(held: Held) -> Any:
    """Return a copy of an object's state with the same tensors, which may be large: objects replace them."""
    state = plain(held.state)
    arrays = [found.value for found in state_leaves(state).values()]
    return copy.deepcopy(state, {id(array): array for array in arrays})


def _within(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Return what reports the progress of one of two readings as that of both."""
    return None if progress is None else lambda done, _: progress(before + done, total)
