"""Activation swapping: bit-identical gradients, and no memory that is reused too early."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chatgot.step.state import StepState
from chatgot.step.train_step import take_step
from chatgot.techniques.experimental.activation_swapping import ActivationSwapping, Swapper
from chatgot.testing import TechniqueSuite, opened
from tensorkeep.errors import TechniqueNotActiveError

CPU = torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 8), nn.GELU(), nn.LayerNorm(8))


def gradients(model: nn.Module, inputs: Tensor, hooks: AbstractContextManager[None]) -> list[Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    with hooks:
        loss = model(inputs).square().sum()
    loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def moved(swapper: Swapper, work: Callable[[], Tensor]) -> list[torch.Size]:
    """Return the shapes of the tensors that are moved out while a graph is built."""
    with swapper.hooks():
        result = work()
    found = [reference() for reference in swapper._order]
    del result
    return [each.host.shape for each in found if each is not None]


class TestActivationSwapping(TechniqueSuite):
    technique = ActivationSwapping
    variants = ({"least": 64}, pytest.param({"pool": False}, marks=pytest.mark.exhaustive))

    @pytest.fixture(autouse=True)
    def check_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Allow it on the CPU, where it saves no memory."""
        monkeypatch.setattr(ActivationSwapping, "missing", lambda self, machine: None)

    def break_on_purpose(self, run: StepState) -> None:
        """Compute the loss without the hooks."""
        run.operations.loss = run.model.loss

    def test_a_step_without_large_tensors_is_an_error(self, tmp_path: Path, data: Path) -> None:
        with (
            opened(self.config_with({}), tmp_path / "run", data) as run,
            pytest.raises(TechniqueNotActiveError, match="0 B were moved") as caught,
            run.techniques.verified(run),
        ):
            take_step(run)
        assert "1,048,576" in str(caught.value.remedy)


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_gradients_are_bit_identical(ahead: int) -> None:
    model = network()
    swapper = Swapper(CPU, list(model.parameters()), least=1, ahead=ahead)
    for step in range(5):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        expected = gradients(model, inputs, nullcontext())
        found = gradients(model, inputs, swapper.hooks())
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_two_graphs_at_once_have_their_own_tensors() -> None:
    """Two graphs at once; the backward pass of the first runs twice."""
    model = network()
    swapper = Swapper(CPU, list(model.parameters()), least=1, ahead=2)
    batches = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    expected = []
    for hooks in (nullcontext, swapper.hooks):
        torch.manual_seed(2)
        results = []
        for inputs in batches:
            with hooks():
                results.append(model(inputs).square().sum())
        weights = list(model.parameters())
        found = [torch.autograd.grad(result, weights, retain_graph=True) for result in (*results, results[0])]
        expected = expected or found
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_parameters_and_small_tensors_are_not_moved() -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    swapper = Swapper(CPU, [weight], least=2048, ahead=1)
    small, large = (torch.ones(rows, 64, requires_grad=True) for rows in (4, 64))
    assert moved(swapper, lambda: small.matmul(weight.T)) == []
    assert moved(swapper, lambda: large.matmul(weight.T)) == [large.shape]
    # The name of a device may lack the index, such as "cuda" for "cuda:0".
    named = torch.device("cpu", 0)
    assert large.device != named
    swapper = Swapper(named, [], least=1, ahead=1)
    assert moved(swapper, large.square) == [large.shape]


@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4, 5), ()])
def test_tensors_come_back_with_their_strides(shape: tuple[int, ...]) -> None:
    swapper = Swapper(CPU, [], least=0, ahead=0)
    plain = torch.randn(shape)
    turned = plain.permute(tuple(reversed(range(plain.ndim))))
    for tensor in (plain, plain > 0, plain.bfloat16(), turned, plain.double()):
        found = swapper._unpack(swapper._move_out(tensor))
        assert torch.equal(found, tensor)
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())


def test_a_view_comes_back_without_the_rest_of_its_storage() -> None:
    swapper = Swapper(CPU, [], least=1, ahead=0)
    whole = torch.randn(6, 10)
    for part in (whole[:, 2:5], whole[::2], whole[:1].expand(4, 10)):
        swapped = swapper._move_out(part)
        assert swapped.host.untyped_storage().nbytes() == part.nbytes
        assert torch.equal(swapper._unpack(swapped), part)


class Recorder:
    """Streams and events that do nothing but record the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def named(self, name: str) -> Any:
        """Return a stream, which waits for others."""

        def wait(other: Any) -> None:
            self.calls.append((name, "waits for", other.name))

        return SimpleNamespace(name=name, wait_stream=wait, wait_event=wait)

    def Event(self) -> Any:
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "name", f"what {stream.name} did")
        return event

    def current_stream(self, device: torch.device) -> Any:
        return self.named("computing")

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        self.calls.append(("copies in", stream.name))
        return nullcontext()


def test_streams_wait_for_each_other() -> None:
    recorder = Recorder()
    swapper = Swapper(CPU, [], least=1, ahead=0)
    swapper._backend = recorder
    swapper._out, swapper._back = recorder.named("out"), recorder.named("back")
    swapped = swapper._move_out(torch.ones(4))
    assert recorder.calls == [("out", "waits for", "computing"), ("copies in", "out")]
    recorder.calls.clear()
    swapper._unpack(swapped)
    back = [("copies in", "back"), ("back", "waits for", "what out did"), ("computing", "waits for", "what back did")]
    assert recorder.calls == back
