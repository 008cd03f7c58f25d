"""A restored training loop sees the samples that the first one would have seen, from whatever moment it was saved."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import tensorkeep
from documentation.blocks import ROOT, blocks
from forked import ended, start

EPOCHS = 3


class Noisy(Dataset):
    """Samples with augmentation: every read draws random numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


class Plain(Noisy):
    """Samples without random numbers."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.0


class OwnGenerator(Noisy):
    """Samples with augmentation from a generator of the dataset."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(random.randrange(100))

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, self.rng.random()


class Shuffled(IterableDataset):
    """A stream that each worker shuffles, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(torch.initial_seed() % 1000)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in torch.randperm(11, generator=self.generator).tolist()[first::step]:
            yield index, 0.0


class Permutations:
    """A sampler with a generator that is not torch's, and with epochs."""

    def __init__(self) -> None:
        self.rng = random.Random(random.randrange(100))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, as `DistributedSampler` has it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(10), 10))


def own_generator() -> torch.Generator:
    """A generator with a seed that differs from process to process."""
    return torch.Generator().manual_seed(random.randrange(1000))


def replacing() -> DataLoader:
    """A loader that draws with replacement, 32 samples at a time."""
    data = Plain()
    return DataLoader(data, 9, sampler=RandomSampler(data, True, 40, generator=own_generator()))


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: DataLoader(Noisy(), 3),
    "shuffled by the global generator": lambda: DataLoader(Noisy(), 3, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(Noisy(), 3, shuffle=True, generator=own_generator()),
    "without the last batch": lambda: DataLoader(Noisy(), 3, shuffle=True, drop_last=True),
    "with a generator in the dataset": lambda: DataLoader(OwnGenerator(), 3, shuffle=True),
    "with replacement": replacing,
    "several permutations": lambda: DataLoader(Plain(), 7, sampler=RandomSampler(Plain(), num_samples=25)),
    "weighted": lambda: DataLoader(Plain(), 4, sampler=WeightedRandomSampler([1.0, 2.0] * 5, 10)),
    "batches of a sampler": lambda: DataLoader(Plain(), batch_sampler=BatchSampler(Permutations(), 3, False)),
    "without batches": lambda: DataLoader(Plain(), batch_size=None, sampler=Permutations()),
    "iterable": lambda: DataLoader(Shuffled(), 3),
}


def with_workers(make: Callable[..., DataLoader], **options: Any) -> Callable[[], DataLoader]:
    """The same loader with two workers that are forked."""
    return lambda: make(num_workers=2, multiprocessing_context="fork", **options)


WORKERS: dict[str, tuple[Callable[[], DataLoader], bool | None]] = {
    "indexed, read again": (with_workers(lambda **o: DataLoader(Noisy(), 2, shuffle=True, **o)), None),
    "indexed, skipped": (with_workers(lambda **o: DataLoader(Plain(), 2, shuffle=True, **o)), False),
    "iterable, read again": (with_workers(lambda **o: DataLoader(Shuffled(), 2, **o)), None),
}


class Run:
    """A loop of some epochs that draws random numbers as training does, and may save at any batch."""

    def __init__(
        self, make: Callable[[], DataLoader], seed: int, reread: bool | None = None, epochs: int = EPOCHS
    ) -> None:
        self.epochs = epochs
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.loader = tensorkeep.ResumableLoader(make(), reread=reread)
        self.noise = np.random.default_rng(seed)
        self.seen: list[Any] = []

    @property
    def state(self) -> dict[str, Any]:
        """The state that a user saves."""
        return {"loader": self.loader, "noise": self.noise, "rng": tensorkeep.RandomState()}

    def train(self, after_batch: Callable[[int], None] = lambda count: None) -> list[Any]:
        """Train to the end; return what the loop has seen, one entry a batch."""
        while self.loader.epoch < self.epochs:
            for batch in self.loader:
                drawn = torch.rand(()).item(), random.random(), np.random.rand(), self.noise.random()
                self.seen.append(([np.asarray(each).tolist() for each in batch], drawn))
                after_batch(len(self.seen))
            after_batch(len(self.seen))
        return self.seen


def check_every_position(
    make: Callable[[], DataLoader], folder: Path, reread: bool | None = None, *, stride: int = 1, epochs: int = EPOCHS
) -> None:
    """Save after each batch and after each epoch of one run; compare the rest of a run restored from each."""
    first, taken = Run(make, 1, reread, epochs), []

    def save(count: int) -> None:
        # The second save of one count is between epochs.
        if len(taken) % stride == 0:
            tensorkeep.save(first.state, folder / str(len(taken)))
        taken.append(count)

    expected = first.train(save)
    for number, count in list(enumerate(taken))[::stride]:
        other = Run(make, 2, reread, epochs)
        tensorkeep.load(folder / str(number), into=other.state)
        assert other.train() == expected[count:], (number, count)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_restored_loop_sees_the_same_samples(kind: str, tmp_path: Path) -> None:
    check_every_position(LOADERS[kind], tmp_path, stride=3)


@pytest.mark.integration
@pytest.mark.parametrize("kind", WORKERS)
def test_with_workers(kind: str, tmp_path: Path) -> None:
    make, reread = WORKERS[kind]
    check_every_position(make, tmp_path, reread, stride=5, epochs=2)


def train_and_kill(text: str, folder: Path) -> None:
    """Run the loop of the page, and kill this process in the second epoch."""
    multiprocessing.current_process().daemon = False  # which has no workers

    def kill(step: int, *found: Any) -> None:
        if step == 16:
            os.kill(os.getpid(), signal.SIGKILL)

    page: dict[str, Any] = {}
    exec(text, page)
    page["train"](folder, seen=kill)


@pytest.mark.integration
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_the_loop_of_the_page_continues_after_a_kill(workers: int, tmp_path: Path) -> None:
    text = next(block.text for block in blocks(ROOT / "docs/how-to/data-loaders.md") if "def train" in block.text)
    option = f"shuffle=True, num_workers={workers}, multiprocessing_context={'fork' if workers else None!r}"
    assert text.count("shuffle=True") == 1
    text = text.replace("shuffle=True", option)
    process = start(train_and_kill, text, tmp_path / "killed", output=tmp_path / "output")
    assert ended(process) == -signal.SIGKILL, (tmp_path / "output").read_text()
    page: dict[str, Any] = {}
    exec(text, page)
    whole: dict[int, Any] = {}
    killed: dict[int, Any] = {}
    page["train"](tmp_path / "whole", seen=lambda step, *found: whole.update({step: found}))
    page["train"](tmp_path / "killed", seen=lambda step, *found: killed.update({step: found}))
    # The second of three epochs of 13 batches. The save of step 15 may be unfinished.
    assert min(killed) in (11, 16)
    assert max(killed) == 39
    assert killed == {step: whole[step] for step in killed}


def test_epochs_are_counted_and_an_epoch_left_early_is_over(tmp_path: Path) -> None:
    loader = tensorkeep.ResumableLoader(DataLoader(range(6), 2))
    assert (len(loader), repr(loader)) == (3, "ResumableLoader(epoch=0, batches=0)")
    next(iter(loader))
    assert [int(batch[0]) for batch in loader] == [0, 2, 4]
    assert (loader.epoch, loader.batches) == (2, 0)


def test_the_epoch_of_a_sampler_is_restored(tmp_path: Path) -> None:
    made = [LOADERS["without batches"]() for _ in range(2)]
    made[0].sampler.set_epoch(7)
    loader, other = map(tensorkeep.ResumableLoader, made)
    next(iterator := iter(loader))
    tensorkeep.save({"loader": loader}, tmp_path / "a")
    tensorkeep.load(tmp_path / "a", into={"loader": other})
    assert list(other) == list(iterator)
    assert other.loader.sampler.epoch == 7


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: DataLoader(Plain(), num_workers=1, in_order=False), {}, "in_order=True"),
        (lambda: DataLoader(Shuffled()), {"reread": False}, "StatefulDataLoader"),
        (lambda: DataLoader(Plain(), num_workers=1, persistent_workers=True), {}, "persistent_workers=False"),
    ],
)
def test_refused_loaders(make: Callable[[], DataLoader], options: dict[str, Any], message: str) -> None:
    with pytest.raises(tensorkeep.UsageError, match=message):
        tensorkeep.ResumableLoader(make(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Plain(), 5), "a loader with length 2 in the state, 4 saved"),
        (lambda: DataLoader(Plain(), 3, generator=own_generator()), "with generators"),
    ],
)
def test_another_loader_is_refused_before_anything_changes(
    make: Callable[[], DataLoader], message: str, tmp_path: Path
) -> None:
    tensorkeep.save({"loader": tensorkeep.ResumableLoader(DataLoader(Plain(), 3))}, tmp_path / "a")
    with pytest.raises(tensorkeep.StateMismatchError, match=message):
        tensorkeep.load(tmp_path / "a", into={"loader": tensorkeep.ResumableLoader(make())})


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        (DataLoader(range(10), 2), DataLoader(range(20), 4), "samples 20 in the state, 10 saved"),
        (DataLoader(Shuffled(), 2), DataLoader(Shuffled(), 4), "batch_size 4 in the state, 2 saved"),
        (DataLoader(range(10), sampler=DistributedSampler(range(10), 1, 0)), DataLoader(range(10)), "set_epoch"),
    ],
    ids=["samples", "batch size of a stream", "sampler"],
)
def test_a_loader_of_other_batches_is_refused(
    first: DataLoader, other: DataLoader, message: str, tmp_path: Path
) -> None:
    loader = tensorkeep.ResumableLoader(first)
    next(iter(loader))
    tensorkeep.save({"loader": loader}, tmp_path / "a")
    with pytest.raises(tensorkeep.StateMismatchError, match=message):
        tensorkeep.load(tmp_path / "a", into={"loader": tensorkeep.ResumableLoader(other)})


def test_a_loop_does_not_go_on_after_a_restore_within_it() -> None:
    loader = tensorkeep.ResumableLoader(DataLoader(range(6), 2))
    state = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(state)
    with pytest.raises(tensorkeep.UsageError, match="leave the loop with break"):
        next(iterator)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("reread", [False, True])
def test_a_loader_that_ends_before_the_position_is_refused(reread: bool, tmp_path: Path) -> None:
    class Shrinking(Permutations):
        rest = 10

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.rest))

    loader = tensorkeep.ResumableLoader(DataLoader(Plain(), None, sampler=Shrinking()), reread=reread)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    loader.loader.sampler.rest = 3
    with pytest.raises(tensorkeep.StateMismatchError, match="ended after 3 batches, and 5 were taken"):
        next(iter(loader))


def test_a_plain_data_loader_in_a_state_names_the_wrapper(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError, match=r"tensorkeep\.ResumableLoader"):
        tensorkeep.save({"loader": DataLoader(Plain())}, tmp_path / "a")
