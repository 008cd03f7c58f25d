"""Random-number generators as values of a state."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep

KINDS: dict[str, Any] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda each: torch.rand(3, generator=each).tolist()),
    "python": (random.Random, lambda each: (each.random(), each.gauss())),
    "numpy before 1.17": (np.random.RandomState, lambda each: each.randn(3).tolist()),
    "bit generator": (np.random.PCG64DXSM, lambda each: int(each.random_raw())),
    **{
        kind.__name__: (lambda seed, kind=kind: np.random.Generator(kind(seed)), lambda each: each.random(3).tolist())
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_continues_in_place(kind: str, tmp_path: Path) -> None:
    make, draw = KINDS[kind]
    generator, other = make(1), make(2)
    draw(generator)
    tensorkeep.save({"noise": [generator], "model": torch.nn.Linear(1, 1)}, tmp_path / "a")
    loaded = tensorkeep.load(tmp_path / "a", into={"noise": [other]})
    assert loaded["noise"][0] is other
    assert draw(other) == draw(generator)


def test_generators_within_the_state_of_an_object(tmp_path: Path) -> None:
    class Augmentation:
        def __init__(self, seed: int) -> None:
            self.rng = np.random.default_rng(seed)

        def state_dict(self) -> dict[str, Any]:
            return {"rng": self.rng}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["rng"] is self.rng

    first, other = Augmentation(1), Augmentation(2)
    tensorkeep.save({"augmentation": first}, tmp_path / "a")
    tensorkeep.load(tmp_path / "a", into={"augmentation": other})
    assert other.rng.random() == first.rng.random()


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        (np.random.default_rng(1), np.random.Generator(np.random.MT19937(1)), "'MT19937' in the state, 'PCG64' saved"),
        (torch.Generator(), random.Random(), "a random-number generator in the state, none saved"),
        (7, torch.Generator(), "a random-number generator in the state, none saved"),
    ],
)
def test_another_kind_of_generator_is_refused(saved: Any, given: Any, message: str, tmp_path: Path) -> None:
    tensorkeep.save({"noise": saved}, tmp_path / "a")
    with pytest.raises(tensorkeep.StateMismatchError, match=message):
        tensorkeep.load(tmp_path / "a", into={"noise": given})


def test_without_into_the_states_are_what_torch_and_numpy_take(tmp_path: Path) -> None:
    generator, rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    tensorkeep.save({"torch": generator, "numpy": rng}, tmp_path / "a")
    loaded = tensorkeep.load(tmp_path / "a")
    other, other_rng = torch.Generator(), np.random.default_rng(2)
    other.set_state(loaded["torch"]["state"])
    other_rng.bit_generator.state = loaded["numpy"]
    assert torch.equal(torch.rand(3, generator=other), torch.rand(3, generator=generator))
    assert other_rng.random() == rng.random()


def test_the_generator_of_the_system_has_no_state(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="SystemRandom"):
        tensorkeep.save({"noise": random.SystemRandom()}, tmp_path / "a")


@pytest.mark.parametrize(
    ("generator", "change"),
    [
        (np.random.Generator(np.random.MT19937(1)), lambda state: state["state"].update(pos=10**8)),
        (np.random.RandomState(1), lambda state: state["state"].update(pos=-1)),
        (np.random.Generator(np.random.Philox(1)), lambda state: state.update(buffer_pos=-(10**8))),
        (np.random.default_rng(1), lambda state: state["state"].update(state=-1)),
    ],
    ids=["MT19937", "RandomState", "Philox", "PCG64"],
)
def test_a_state_that_numpy_would_read_memory_for_is_refused(generator: Any, change: Any, tmp_path: Path) -> None:
    tensorkeep.save({"noise": generator}, tmp_path / "a")
    state = tensorkeep.load(tmp_path / "a")
    change(state["noise"])
    tensorkeep.save(state, tmp_path / "b")
    with pytest.raises(tensorkeep.StateMismatchError, match=r"beyond 0 to|out of bounds"):
        tensorkeep.load(tmp_path / "b", into={"noise": generator})


def test_a_global_state_that_numpy_would_read_memory_for_is_refused(tmp_path: Path) -> None:
    state = tensorkeep.RandomState().state_dict()
    state["numpy"]["position"] = 10**8
    tensorkeep.save({"rng": state}, tmp_path / "a")
    with pytest.raises(tensorkeep.StateMismatchError, match="position 100000000 was saved, beyond 0 to 624"):
        tensorkeep.load(tmp_path / "a", into={"rng": tensorkeep.RandomState()})
