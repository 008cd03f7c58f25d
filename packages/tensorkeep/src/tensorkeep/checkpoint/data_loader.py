"""`ResumableLoader`: a data loader that continues an epoch after the last batch that was trained on."""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.stateful import RandomState
from tensorkeep.errors import StateMismatchError, UsageError
from tensorkeep.state.stateful import Stateful, generator_state

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class ResumableLoader:
    """Iterate over a `torch.utils.data.DataLoader`, and continue within an epoch after a restore.

    Put it into the state beside `RandomState`, and save inside the loop or between epochs. The next loop after a
    restore yields the batches that were not taken yet, in the same order, and the epochs after it are shuffled in the
    same way. The random-number generators that are attributes of the loader, its samplers and its dataset are saved
    with it.

    Parameters
    ----------
    loader : torch.utils.data.DataLoader
        The loader, made in the same way in every process.
    reread : bool, optional
        How the batches before the position are skipped. True reads them again and drops them: exact for every dataset.
        False takes their indices from the sampler and reads nothing: exact if the dataset draws no random numbers in
        worker processes. The default is False for an indexed dataset without workers, else True.

    Attributes
    ----------
    epoch : int
        The number of epochs that are over.
    batches : int
        The number of batches of this epoch that the loop has taken.

    Raises
    ------
    UsageError
        If the loader has ``persistent_workers=True`` or ``in_order=False``, or an iterable dataset and ``reread`` is
        False.

    Examples
    --------
    >>> import tempfile, tensorkeep
    >>> from torch.utils.data import DataLoader
    >>> folder = tempfile.TemporaryDirectory()
    >>> loader = tensorkeep.ResumableLoader(DataLoader(range(6), batch_size=2))
    >>> for batch in loader:
    ...     if loader.batches == 2:
    ...         _ = tensorkeep.save({"loader": loader}, f"{folder.name}/a")
    ...         break
    >>> other = tensorkeep.ResumableLoader(DataLoader(range(6), batch_size=2))
    >>> _ = tensorkeep.load(f"{folder.name}/a", into={"loader": other})
    >>> [batch.tolist() for batch in other]
    [[4, 5]]
    >>> folder.cleanup()
    """

    def __init__(self, loader: "DataLoader[Any]", *, reread: bool | None = None) -> None:
        from torch.utils.data import IterableDataset

        is_indexed = not isinstance(loader.dataset, IterableDataset)
        if not getattr(loader, "in_order", True):
            text = "a loader with in_order=False has no order to continue in"
            raise UsageError(text, remedy="make the DataLoader with in_order=True")
        if reread is False and not is_indexed:
            text = "batches of an iterable dataset cannot be skipped by index"
            raise UsageError(text, remedy="leave out `reread`, or use torchdata's StatefulDataLoader")
        # Their random numbers continue from epoch to epoch, and only the first epoch draws a seed for them.
        if loader.persistent_workers:
            text = "workers that outlive an epoch have states that cannot be saved"
            raise UsageError(text, remedy="make the DataLoader with persistent_workers=False")
        self.loader = loader
        self.epoch = 0
        self.batches = 0
        self._reread = not is_indexed or loader.num_workers > 0 if reread is None else reread
        self._start: dict[str, Any] | None = None  # all that the order of this epoch depends on, as it began
        self._restored: dict[str, Any] | None = None  # generators at the position where the next loop continues
        self._loop: object = None  # the loop that the position belongs to

    def __repr__(self) -> str:
        return f"ResumableLoader(epoch={self.epoch}, batches={self.batches})"

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        if restored is not None and self._start is not None:
            iterator = self._continue(self._start, restored)
        else:
            # A loop that was left early has begun this epoch.
            self.epoch += self._start is not None
            self.batches = 0
            self._start = {"random": _random_state(), "generators": self._generators(), "epochs": self._epochs()}
            iterator = iter(self.loader)
        loop = self._loop = object()
        for batch in iterator:
            self.batches += 1
            yield batch
            if self._loop is not loop:
                text = "a loop over a ResumableLoader continues after a restore, or after another loop has begun"
                raise UsageError(text, remedy="leave the loop with break, and begin a new one")
        self.epoch, self.batches, self._start = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the generators as they are and as they were at the start of the epoch."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "setup": self._setup(),
            "generators": self._generators(),
            "start": self._start,
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the state was saved by a loader of other batches, or with other generators."""
        if not isinstance(state, dict) or "setup" not in state:
            raise ValueError("a ResumableLoader in the state, none saved")
        own = {**self._setup(), "generators": [*self._generators()]}
        saved = {**state["setup"], "generators": [*state["generators"]]}
        if state["start"] is not None:
            own["set_epoch() of"], saved["set_epoch() of"] = [*self._epochs()], [*state["start"]["epochs"]]
        for key, value in own.items():
            # Batches of indices are the same for any number of workers.
            if value != saved[key] and (key != "num_workers" or self._reread):
                raise ValueError(f"a loader with {key} {value} in the state, {saved[key]} saved")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position with the next loop; raises as `check_state_dict`."""
        self.check_state_dict(state)
        self.epoch, self.batches, self._start = state["epoch"], state["batches"], state["start"]
        self._restored, self._loop = state["generators"], None
        self._set_generators(self._restored)

    def _continue(self, start: dict[str, Any], restored: dict[str, Any]) -> Iterator[Any]:
        """Begin the epoch again as it began, and skip the batches that were taken."""
        here = _random_state()
        RandomState().load_state_dict(start["random"])
        self._set_generators(start["generators"])
        for owner, epoch in start["epochs"].items():
            self._owners()[owner].set_epoch(epoch)
        try:
            if self._reread:
                iterator = iter(self.loader)
                for number in range(self.batches):
                    if next(iterator, self) is self:
                        self._refuse_short(number)
                return iterator
            remaining = _Remaining(self._index_sampler(), self.batches, self)
            iterator = iter(self._with_sampler(remaining))
            # The loader draws the seed of its workers before the sampler draws anything.
            remaining.skip()
            return iterator
        finally:
            # The generators continue where they were saved, also if the training draws from them.
            RandomState().load_state_dict(here)
            self._set_generators(restored)

    def _index_sampler(self) -> Any:
        batch_sampler = self.loader.batch_sampler
        return self.loader.sampler if batch_sampler is None else batch_sampler

    def _with_sampler(self, sampler: "_Remaining") -> "DataLoader[Any]":
        rest = copy.copy(self.loader)
        # `__setattr__` of a DataLoader refuses another sampler, because iterators may be open. This one has none.
        vars(rest)["sampler" if self.loader.batch_sampler is None else "batch_sampler"] = sampler
        return rest

    def _refuse_short(self, number: int) -> None:
        text = f"the loader ended after {number} batches, and {self.batches} were taken when the state was saved"
        raise StateMismatchError(text, remedy="use the dataset and the sampler that the state was saved with")

    def _setup(self) -> dict[str, Any]:
        return {
            "length": _length(self.loader),
            "samples": _length(self.loader.sampler),
            "batch_size": self.loader.batch_size,
            "num_workers": self.loader.num_workers,
        }

    def _owners(self) -> dict[str, Any]:
        """The objects that decide on the order of the samples."""
        batch_sampler = self.loader.batch_sampler
        return {
            "loader": self.loader,
            "sampler": self.loader.sampler,
            "batch_sampler": batch_sampler,
            "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
            "dataset": self.loader.dataset,
        }

    def _stateful_generators(self) -> dict[str, Stateful]:
        found: dict[int, tuple[str, Stateful]] = {}
        for owner, value in self._owners().items():
            for name, attribute in getattr(value, "__dict__", {}).items():
                methods = generator_state(attribute)
                # A generator of several owners counts once.
                if methods is not None:
                    found.setdefault(id(attribute), (f"{owner}.{name}", methods))
        return dict(found.values())

    def _generators(self) -> dict[str, Any]:
        return {name: generator.state_dict() for name, generator in self._stateful_generators().items()}

    def _set_generators(self, states: dict[str, Any]) -> None:
        for name, generator in self._stateful_generators().items():
            generator.load_state_dict(states[name])

    def _epochs(self) -> dict[str, int]:
        """Samplers and datasets that shuffle by a number of the epoch, such as `DistributedSampler`."""
        return {
            name: owner.epoch
            for name, owner in self._owners().items()
            if callable(getattr(owner, "set_epoch", None)) and isinstance(getattr(owner, "epoch", None), int)
        }


class _Remaining:
    """One iteration over a sampler, without its first items."""

    def __init__(self, sampler: Any, count: int, loader: ResumableLoader) -> None:
        self._items, self._count, self._loader = iter(sampler), count, loader

    def skip(self) -> None:
        """Take the first items, unless that is done."""
        count, self._count = self._count, 0
        for number in range(count):
            if next(self._items, self) is self:
                self._loader._refuse_short(number)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._items)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:  # of an iterable dataset
        return None


def _random_state() -> dict[str, Any]:
    """The global generators on the CPU, from which samplers and workers are seeded."""
    return {name: state for name, state in RandomState().state_dict().items() if name != "cuda"}
