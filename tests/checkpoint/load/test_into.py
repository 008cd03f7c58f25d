"""Restoring training states: mismatches are named before anything is touched."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorkeep
from tensorkeep import CheckpointManager, RandomState
from tensorkeep.checkpoint.stateful import expand
from tensorkeep.testing.equality import same


def saved(state: Any, path: Path) -> Path:
    tensorkeep.save(expand(state), path / "saved")
    return path / "saved"


def restore(path: Path, into: Any, **options: Any) -> Any:
    return tensorkeep.load(path, into=into, **options)


def refusal(path: Path, into: Any, model: nn.Module, **options: Any) -> tensorkeep.StateMismatchError:
    """Return the error, after a check that the model is unchanged."""
    before = [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(tensorkeep.StateMismatchError, match="nothing was touched") as raised:
        restore(path, into, **options)
    assert same(list(model.state_dict().values()), before)
    return raised.value


def linear(value: float, width: int = 4) -> nn.Linear:
    made = nn.Linear(width, width)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def is_filled(model: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in model.parameters())


def scheduled(steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


class Average:
    """An average of weights, as users write it."""

    def __init__(self, size: int, value: float = 0.0) -> None:
        self.shadow = {"w": torch.full((size,), value)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = dict(state)


class Buffer(Average):
    """Accepts any number of rows."""

    seen: Any = None

    def check_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["w"].device.type, state["w"].shape
        if len(state["w"]) > 100:
            raise ValueError("more rows than it may hold")


class Picky:
    """Refuses its saved state only in load_state_dict."""

    def __init__(self, numbers: Any = (1, 2)) -> None:
        self.numbers = list(numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["numbers"]) != 2:
            raise ValueError("two numbers are wanted")
        self.numbers = state["numbers"]


# What objects refuse


def test_a_scaler_that_was_disabled_is_refused_first(tmp_path: Path) -> None:
    _, scheduler = scheduled(3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    path = saved({"model": linear(1), "scheduler": scheduler, "scaler": scaler}, tmp_path)
    model, other = linear(0), scheduled(1)[1]
    before = other.state_dict()
    into = {"model": model, "scheduler": other, "scaler": torch.amp.GradScaler("cpu", enabled=True)}
    error = refusal(path, into, model)
    assert "the GradScaler at 'scaler' does not accept its saved state" in str(error)
    assert error.different == ("scaler",)
    assert other.state_dict() == before, "what was restored before it is not put back"


def test_an_object_that_refuses_its_state_keeps_its_previous_one(tmp_path: Path) -> None:
    class HalfWay(Picky):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.numbers = state["numbers"]
            super().load_state_dict(state)

    path = saved({"model": linear(1), "picky": Picky([1, 2, 3])}, tmp_path)
    model, picky = linear(0), HalfWay([8, 9])
    refusal(path, {"model": model, "picky": picky}, model)
    assert picky.numbers == [8, 9]


def test_an_object_that_refuses_after_the_tensors_is_reported_as_such(tmp_path: Path) -> None:
    class Late(Average):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("never")

    path = saved({"model": linear(1), "average": Average(3)}, tmp_path)
    with pytest.raises(tensorkeep.StateMismatchError, match="never; the tensors of the state are overwritten already"):
        restore(path, {"model": linear(0), "average": Late(3)})


class OtherDevices(RandomState):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cuda": [torch.get_rng_state()] * (torch.cuda.device_count() + 7)}


def test_random_states_of_other_devices_are_refused_first_and_can_be_left_out(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "rng": OtherDevices(), "step": 5}, tmp_path)
    model, numbers = linear(0), torch.get_rng_state()
    error = refusal(path, {"model": model, "rng": RandomState(), "step": 0}, model)
    assert "rng: holds the random states of" in str(error)
    assert 'select=["model.*"]' in str(error)
    restored = restore(path, {"model": model, "step": 0}, select=["model.*"])
    assert (list(restored), restored["step"]) == (["model", "step"], 5)
    assert restored["model"] is model
    assert is_filled(model, 1)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_random_states_that_are_set_by_hand_are_checked_too() -> None:
    with pytest.raises(tensorkeep.UnsupportedError, match="CUDA devices"):
        RandomState().load_state_dict(OtherDevices().state_dict())


@pytest.mark.parametrize("copies", [False, True])
def test_tensors_of_an_object_must_have_the_saved_shapes(tmp_path: Path, copies: bool) -> None:
    class Copying(Average):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow["w"].copy_(state["w"])

    path = saved({"model": linear(1), "average": Average(5)}, tmp_path)
    model, average = linear(0), (Copying if copies else Average)(9)
    error = refusal(path, {"model": model, "average": average}, model)
    assert "average.w: float32 [9] in the state, float32 [5] saved" in str(error)
    assert average.shadow["w"].shape == (9,)


def test_an_object_that_has_no_tensors_yet_takes_any(tmp_path: Path) -> None:
    path = saved({"average": Average(5, 2.0), "other": Average(3, 4.0)}, tmp_path)
    empty, none = Average(0), Average(0)
    none.shadow = {}
    restore(path, {"average": empty, "other": none})
    assert torch.equal(empty.shadow["w"], torch.full((5,), 2.0))
    assert torch.equal(none.shadow["w"], torch.full((3,), 4.0))


def test_check_state_dict_decides(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "buffer": Buffer(50, 3.0)}, tmp_path)
    buffer = Buffer(2)
    restore(path, {"model": linear(0), "buffer": buffer})
    assert buffer.seen == ("meta", (50,))
    assert torch.equal(buffer.shadow["w"], torch.full((50,), 3.0))
    (tmp_path / "large").mkdir()
    path = saved({"model": linear(1), "buffer": Buffer(101)}, tmp_path / "large")
    model = linear(0)
    assert "buffer: more rows than it may hold" in str(refusal(path, {"model": model, "buffer": buffer}, model))


# Keys and plain values


def test_keys_of_one_side_are_named_whatever_their_values(tmp_path: Path) -> None:
    optimizer, scheduler = scheduled(1)
    state = {"model": linear(1), "optimizer": optimizer, "scheduler": scheduler, "rng": RandomState(), "epoch": 7}
    path = saved(state, tmp_path)
    model = linear(0)
    error = refusal(path, {"model": model, "optimizer": scheduled(0)[0], "best": 1.0}, model)
    assert error.missing == ("best",)
    assert not error.extra, "entries of the top level may be left out"


def test_inner_keys_are_compared_in_containers_with_tensors(tmp_path: Path) -> None:
    path = saved({"run": {"model": linear(1), "counts": {"seen": 3}, "epoch": 7}, "models": [linear(1)]}, tmp_path)
    model = linear(0)
    error = refusal(path, {"run": {"model": model, "step": 0}, "models": [linear(0), linear(0)]}, model)
    assert error.missing == ("run.step", "models.1")
    assert error.extra == ("run.counts", "run.epoch")


def test_plain_values_come_back_as_they_were_saved(tmp_path: Path) -> None:
    values = {
        "step": 5,
        "metrics": {"loss": 0.5, "best": [1, 2]},
        "name": "run",
        "data": None,
        "history": [{}, {"a": 1}],
    }
    path = saved({"model": linear(1), **values}, tmp_path)
    given = {"step": 0, "metrics": {}, "name": None, "data": {"epoch": 3}, "history": []}
    restored = restore(path, {"model": linear(0), **given})
    assert {key: restored[key] for key in values} == values


def test_numpy_scalars_are_plain_values(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "best": np.float64(0.25), "last": np.float32(0.5), "step": 3}, tmp_path)
    restored = restore(path, {"model": linear(0), "best": 0.0, "last": np.float32(0), "step": np.int64(0)})
    assert (restored["best"], restored["last"], restored["step"]) == (0.25, 0.5, 3)
    assert type(restored["last"]) is np.float32


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([torch.zeros(2)], "weights: list in the state, dict saved"),
        (torch.zeros(2), "weights: tensor in the state, dict saved"),
        (None, "weights: NoneType in the state, dict saved"),
        ({"w": 0}, "weights.w: int in the state, tensor saved"),
        ({}, "only in the checkpoint: weights.w"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path: Path, given: Any, expected: str) -> None:
    path = saved({"model": linear(1), "weights": {"w": torch.ones(2)}}, tmp_path)
    model = linear(0)
    assert expected in str(refusal(path, {"model": model, "weights": given}, model))


def test_a_tensor_where_a_plain_value_was_saved_is_named(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "step": 5}, tmp_path)
    model = linear(0)
    error = refusal(path, {"model": model, "step": torch.tensor(0)}, model)
    assert "step: tensor in the state, int saved" in str(error)


# Containers and objects within objects

Pair = namedtuple("Pair", ["model", "average"])


@tensorkeep.register
@dataclass(frozen=True)
class Run:
    model: Any
    step: int


@pytest.mark.parametrize("kind", ["ordered", "named tuple", "dataclass", "tuple for a list"])
def test_objects_are_found_in_all_containers(tmp_path: Path, kind: str) -> None:
    def build(model: nn.Module, *, given: bool) -> Any:
        made = {
            "ordered": OrderedDict(model=model, step=3),
            "named tuple": Pair(model, Average(2)),
            "dataclass": Run(model, 3),
            "tuple for a list": (model, 3) if given else [model, 3],
        }
        return {"run": made[kind]}

    model = linear(0)
    restored = restore(saved(build(linear(1), given=False), tmp_path), build(model, given=True))["run"]
    assert is_filled(model, 1)
    if kind == "ordered":
        assert type(restored) is OrderedDict
        assert (restored["model"], restored["step"]) == (model, 3)
    elif kind == "tuple for a list":
        assert restored == [model, 3]
    else:
        assert restored.model is model
        assert kind == "named tuple" or restored == Run(model, 3)


class Holder:
    """Its state contains other objects."""

    def __init__(self, value: float, steps: int) -> None:
        self.model = linear(value)
        self.optimizer, self.scheduler = scheduled(steps)
        self.steps = steps

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [self.model, self.scheduler], "optimizer": self.optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model, self.scheduler = state["inner"]
        self.optimizer, self.steps = state["optimizer"], state["steps"]


def test_objects_in_the_states_of_objects_are_loaded(tmp_path: Path) -> None:
    path = saved({"holder": Holder(1, 3)}, tmp_path)
    holder = Holder(0, 0)
    model, scheduler = holder.model, holder.scheduler
    restore(path, {"holder": holder})
    assert (holder.model, holder.scheduler, holder.steps) == (model, scheduler, 3)
    assert is_filled(model, 1)
    assert scheduler.last_epoch == 3
    assert holder.optimizer.param_groups[0]["lr"] == 0.125


def test_objects_within_objects_are_compared_first(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "holder": Holder(1, 3)}, tmp_path)
    model, holder = linear(0), Holder(0, 0)
    holder.model = linear(0, width=5)
    error = refusal(path, {"model": model, "holder": holder}, model)
    assert "holder.inner.0.weight: float32 [5, 5] in the state, float32 [4, 4] saved" in str(error)
    assert holder.scheduler.last_epoch == 0


def test_an_object_that_contains_itself_is_refused(tmp_path: Path) -> None:
    class Endless(Average):
        def state_dict(self) -> dict[str, Any]:
            return {"self": self}

    with pytest.raises(tensorkeep.UnsupportedLeafError, match="nested deeper than 128 levels"):
        expand({"endless": Endless(1)})


def test_a_class_is_not_a_stateful_object(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="a value of type type cannot be saved"):
        saved({"model": nn.Linear}, tmp_path)


# Modules


def test_a_bare_module_is_a_state(tmp_path: Path) -> None:
    path, model = saved(linear(1), tmp_path), linear(0)
    assert restore(path, model) is model
    assert is_filled(model, 1)
    wider = linear(0, width=5)
    assert "weight: float32 [5, 5] in the state" in str(refusal(path, wider, wider))


def tied(value: float) -> dict[str, nn.Module]:
    encoder, decoder = linear(value), linear(value)
    decoder.weight = encoder.weight
    return {"encoder": encoder, "decoder": decoder}


def test_weights_tied_between_modules(tmp_path: Path) -> None:
    path, other = saved(tied(1), tmp_path), tied(0)
    restore(path, other)
    assert other["decoder"].weight is other["encoder"].weight
    assert is_filled(other["encoder"], 1)
    loose: dict[str, nn.Module] = {"encoder": linear(0), "decoder": linear(0)}
    restore(path, loose)
    assert all(is_filled(model, 1) for model in loose.values())


def test_weights_that_are_tied_now_but_were_not_are_refused(tmp_path: Path) -> None:
    path, other = saved({"encoder": linear(1), "decoder": linear(2)}, tmp_path), tied(0)
    assert "shares memory" in str(refusal(path, other, other["encoder"]))


def test_one_module_under_two_keys(tmp_path: Path) -> None:
    model, other = linear(1), linear(0)
    restored = restore(saved({"model": model, "best": model}, tmp_path), {"model": other, "best": other})
    assert restored["model"] is restored["best"] is other
    assert is_filled(other, 1)


def test_an_average_that_shares_memory_with_the_model_gets_its_own(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "average": Average(4, 2.0)}, tmp_path)
    model, average = linear(0), Average(4)
    average.shadow["w"] = model.bias.detach()
    restore(path, {"model": model, "average": average})
    assert is_filled(model, 1)
    assert torch.equal(average.shadow["w"], torch.full((4,), 2.0))


def test_an_averaged_model(tmp_path: Path) -> None:
    def build(value: float, updates: int) -> torch.optim.swa_utils.AveragedModel:
        model = linear(value)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(updates):
            averaged.update_parameters(model)
        return averaged

    other = build(0, 0)
    restore(saved({"averaged": build(1, 3)}, tmp_path), {"averaged": other})
    assert int(other.n_averaged) == 3
    assert is_filled(other.module, 1)


class Counting(nn.Linear):
    """Has an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_the_extra_state_of_a_module_may_have_another_shape(tmp_path: Path) -> None:
    model, other = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    model[0].extra = {"calls": 3, "amax": torch.ones(5), "best": np.float64(0.5)}
    other[0].extra = {"amax": torch.zeros(2), "history": []}
    restore(saved({"model": model}, tmp_path), {"model": other})
    assert same(other[0].extra, model[0].extra)
    assert torch.equal(other[0].weight, model[0].weight)


def test_an_extra_state_that_only_one_has_is_named(tmp_path: Path) -> None:
    path = saved({"model": Counting(4, 4)}, tmp_path)
    model = linear(0)
    assert refusal(path, {"model": model}, model).extra == ("model._extra_state",)


# A part of it


def test_unselected_values_are_left_unchanged(tmp_path: Path) -> None:
    state = {"models": [linear(1), linear(2)], "average": Average(3, 4.0), "scheduler": scheduled(3)[1], "step": 9}
    path = saved(state, tmp_path)
    models, average, scheduler = [linear(0), linear(0)], Average(3), scheduled(0)[1]
    into = {"models": models, "average": average, "scheduler": scheduler, "new": torch.zeros(2)}
    restored = restore(path, into, select="models.1.*")
    assert is_filled(models[0], 0)
    assert is_filled(models[1], 2)
    assert not average.shadow["w"].any()
    assert scheduler.last_epoch == 0
    assert restored == {"models": models, "scheduler": scheduler, "step": 9}


@pytest.mark.parametrize("pattern", ["scheduler", "scheduler.*", "sch*", "*epoch"])
def test_objects_without_tensors_are_selected_by_their_keys(tmp_path: Path, pattern: str) -> None:
    path = saved({"model": linear(1), "scheduler": scheduled(3)[1]}, tmp_path)
    model, scheduler = linear(0), scheduled(0)[1]
    restored = restore(path, {"model": model, "scheduler": scheduler}, select=pattern)
    assert scheduler.last_epoch == 3
    assert is_filled(model, 0)
    assert restored == {"scheduler": scheduler}


def test_tensors_of_an_object_are_selected_with_it(tmp_path: Path) -> None:
    path = saved({"holder": Holder(1, 3), "model": linear(1)}, tmp_path)
    holder, model = Holder(0, 0), linear(0)
    restore(path, {"holder": holder, "model": model}, select="holder.*")
    assert is_filled(holder.model, 1)
    assert holder.scheduler.last_epoch == 3
    assert is_filled(model, 0)
    holder = Holder(0, 0)
    restore(path, {"holder": holder, "model": model}, select="model.*")
    assert is_filled(holder.model, 0)
    assert holder.scheduler.last_epoch == 0
    assert is_filled(model, 1)


def test_some_tensors_of_a_module_can_be_selected_but_not_of_another_object(tmp_path: Path) -> None:
    two = Average(3, 1.0)
    two.shadow["v"] = torch.ones(2)
    path = saved({"model": linear(1), "average": two}, tmp_path)
    model = linear(0)
    restore(path, {"model": model, "average": Average(3)}, select="model.bias")
    assert not model.weight.any()
    assert bool((model.bias == 1).all())
    with pytest.raises(tensorkeep.UsageError, match="only some tensors of the Average at 'average' are selected"):
        restore(path, {"model": model, "average": Average(3)}, select="average.w")


def test_selected_tensors_must_be_given(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "average": Average(3)}, tmp_path)
    model = linear(0)
    assert refusal(path, {"model": model}, model, select=["model.*", "average.*"]).extra == ("average.w",)


def test_without_a_state_the_selected_tensors_are_loaded(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "average": Average(3)}, tmp_path)
    assert list(restore(path, None, select="average.*")) == ["average"]


# Reading


def test_progress_covers_both_readings(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "average": Average(5)}, tmp_path)
    empty = Average(0)
    seen: list[tuple[int, int]] = []
    restore(path, {"model": linear(0), "average": empty}, progress=lambda done, total: seen.append((done, total)))
    assert len(empty.shadow["w"]) == 5
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {(16 + 4 + 5) * 4}
    assert seen[-1][0] == seen[-1][1]


def training(value: float, steps: int) -> dict[str, Any]:
    torch.manual_seed(int(value))
    model = linear(value)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": Average(3, value), "step": steps}


@pytest.mark.parametrize("used", [False, True])
def test_a_step_that_was_begun_before_it_was_found_damaged_leaves_nothing_behind(tmp_path: Path, used: bool) -> None:
    first, second = training(1, 2), training(2, 5)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, first).wait()
        manager.save(2, second).wait()
    file = tmp_path / "step-000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    into = training(3, 1 if used else 0)
    with pytest.raises(tensorkeep.CorruptCheckpointError):
        restore(tmp_path / "step-000002", into)
    assert into["scheduler"].last_epoch == 5, "it found the damage before it began"
    with pytest.warns(UserWarning, match="step-000002 is skipped"):
        restored = CheckpointManager(tmp_path).restore(into=into)
    assert same(expand(restored), expand(first))
    assert restored["model"] is into["model"]


# Entries of the top level that are not given


def training_checkpoint(path: Path) -> Path:
    model = linear(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    state = {"model": model, "optimizer": optimizer, "mask": torch.ones(3), "best": np.float64(0.5), "step": 7}
    tensorkeep.save(state, path / "run")
    return path / "run"


def test_objects_are_saved_and_loaded_like_their_states(tmp_path: Path) -> None:
    path = training_checkpoint(tmp_path)
    model = linear(0)
    optimizer = torch.optim.AdamW(model.parameters())
    found = tensorkeep.load(path, into={"model": model, "optimizer": optimizer, "mask": torch.zeros(3), "step": 0})
    assert found["model"] is model
    assert found["optimizer"] is optimizer
    assert found["step"] == 7
    assert is_filled(model, 1)
    saved_state = tensorkeep.load(path)
    assert same(optimizer.state_dict(), saved_state["optimizer"]), "a new AdamW takes the saved state"


@pytest.mark.parametrize("opened", [False, True])
def test_entries_that_are_not_given_are_left_alone(tmp_path: Path, opened: bool) -> None:
    path = training_checkpoint(tmp_path)
    model = linear(0)
    if opened:
        with tensorkeep.open(path) as checkpoint:
            found = checkpoint.load(into={"model": model})
    else:
        found = tensorkeep.load(path, into={"model": model})
    assert found == {"model": model, "best": 0.5, "step": 7}
    assert found["model"] is model
    assert is_filled(model, 1)


def test_a_manager_restores_only_what_is_given(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": linear(1), "optimizer": torch.optim.AdamW(linear(1).parameters())}).wait()
        model = linear(0)
        manager.restore(into={"model": model})
    assert is_filled(model, 1)


def test_one_object_alone(tmp_path: Path) -> None:
    tensorkeep.save(linear(1), tmp_path / "saved")
    tensorkeep.save_async(linear(2), tmp_path / "later").wait()
    for name, value in (("saved", 1), ("later", 2)):
        model = linear(0)
        assert tensorkeep.load(tmp_path / name, into=model) is model
        assert is_filled(model, value)


def test_within_an_entry_nothing_may_be_missing(tmp_path: Path) -> None:
    path = training_checkpoint(tmp_path)
    model = nn.Linear(4, 4, bias=False)
    assert refusal(path, {"model": model}, model).extra == ("model.bias",)
    assert refusal(path, {"model": {"weight": model.weight}}, model).extra == ("model.bias",)


def test_a_dict_of_tensors_is_complete(tmp_path: Path) -> None:
    state = {**linear(1).state_dict(), "optimizer": {"m": torch.ones(2)}, "step": 7}
    tensorkeep.save(state, tmp_path / "flat")
    model = nn.Linear(4, 4, bias=False)
    assert refusal(tmp_path / "flat", dict(model.state_dict()), model).extra == ("bias",)
    found = tensorkeep.load(tmp_path / "flat", into=dict(linear(0).state_dict()))
    assert list(found) == ["weight", "bias", "step"]


def test_a_flat_file_fits_a_nested_state(tmp_path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"model.w": torch.ones(2), "model.b": torch.ones(1)}, tmp_path / "a.safetensors")
    weight, bias = torch.zeros(2), torch.zeros(1)
    tensorkeep.load(tmp_path / "a.safetensors", into={"model": {"w": weight, "b": bias}})
    assert weight.sum() + bias.sum() == 3


# What is not strict


def test_not_strict_loads_what_fits_and_names_the_rest(tmp_path: Path) -> None:
    saved_model = nn.ModuleDict({"body": linear(1), "head": nn.Linear(4, 2), "old": nn.Linear(1, 1)})
    tensorkeep.save({"model": saved_model, "average": linear(1).state_dict(), "step": 7}, tmp_path / "c")
    model = nn.ModuleDict({"body": linear(0), "head": nn.Linear(4, 3), "new": nn.Linear(1, 1)})
    head, average = model["head"].weight.detach().clone(), dict(nn.Linear(4, 4, bias=False).state_dict())
    with pytest.warns(tensorkeep.StateMismatchWarning) as caught:
        found = tensorkeep.load(
            tmp_path / "c", into={"model": model, "average": average, "rng": RandomState()}, strict=False
        )
    [warning] = [each.message for each in caught]
    assert isinstance(warning, tensorkeep.StateMismatchWarning)
    assert caught[0].filename == __file__
    assert warning.missing == ("rng", "model.new.weight", "model.new.bias")
    assert warning.extra == ("model.old.weight", "model.old.bias", "average.bias")
    assert warning.different == ("model.head.weight", "model.head.bias")
    assert is_filled(model["body"], 1)
    assert torch.equal(model["head"].weight, head)
    assert bool((average["weight"] == 1).all())
    assert (found["model"], found["step"]) == (model, 7)


def test_not_strict_warns_of_nothing_if_all_fits(tmp_path: Path) -> None:
    model = linear(0)
    tensorkeep.load(training_checkpoint(tmp_path), into={"model": model}, strict=False)
    assert is_filled(model, 1)


def test_not_strict_is_an_error_if_nothing_fits(tmp_path: Path) -> None:
    path = training_checkpoint(tmp_path)
    model = nn.ModuleDict({"module": linear(0)})
    assert "only in the checkpoint: model.weight" in str(refusal(path, {"model": model}, model, strict=False))


def test_not_strict_does_not_cast(tmp_path: Path) -> None:
    model = linear(0).double()
    error = refusal(training_checkpoint(tmp_path), {"model": model}, model, strict=False)
    assert error.different == ("model.weight", "model.bias")
    assert "convert the state to the saved dtype first" in str(error)


def test_not_strict_needs_all_of_an_optimizer(tmp_path: Path) -> None:
    path = training_checkpoint(tmp_path)
    model = linear(0)
    other = torch.optim.AdamW([model.weight])
    error = refusal(path, {"model": model, "optimizer": other}, model, strict=False)
    assert error.different == ("optimizer",)
    assert str(error.remedy).startswith("leave entries that do not fit out of `into`: only")


def test_not_strict_needs_a_state(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UsageError, match="strict=False needs `into`"):
        tensorkeep.load(training_checkpoint(tmp_path), strict=False)


# Remedies


def wrapped(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"module": model})


@pytest.mark.parametrize(
    ("state", "into", "remedy"),
    [
        (
            {"model": linear(1), "step": 7},
            linear(0),
            "give it under the key that it was saved with: into={'model': ...}",
        ),
        (linear(1), {"model": linear(0)}, "it was saved alone: give it to `into` without a key"),
        ({"model": wrapped(linear(1))}, {"model": linear(0)}, "only one of the models is wrapped"),
        ({"model": linear(1)}, {"model": wrapped(linear(0))}, "only one of the models is wrapped"),
        ({"model": linear(1)}, {"mdoel": linear(0), "step": 1}, "did you mean the key 'model'?"),
        ({"model": linear(1)}, {"model": linear(0, width=5)}, "load only what fits (strict=False)"),
        ({"model": linear(1)}, {"model": linear(0).half()}, "saved dtype first (module.to(torch.float32))"),
        ({"w": torch.ones(2)}, {"w": np.ones(2, np.float32)}, "leave entries that do not fit out"),
        ({"model": linear(1)}, [linear(0)], "give a dict with keys that were saved, such as into={'model': ...}"),
    ],
)
def test_mistakes_that_are_often_made_have_their_remedy(tmp_path: Path, state: Any, into: Any, remedy: str) -> None:
    tensorkeep.save(state, tmp_path / "c")
    with pytest.raises(tensorkeep.StateMismatchError) as caught:
        tensorkeep.load(tmp_path / "c", into=into)
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("strict", [True, False])
def test_an_unknown_key_is_answered_with_the_keys_that_were_saved(tmp_path: Path, strict: bool) -> None:
    tensorkeep.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "c")
    with pytest.raises(tensorkeep.StateMismatchError, match="the keys that were saved are 'model'"):
        tensorkeep.load(tmp_path / "c", into={"net": {"w": torch.ones(2)}}, strict=strict)


def test_renamed_layers_are_answered_with_a_way_that_works(tmp_path: Path) -> None:
    saved, renamed = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    tensorkeep.save({"model": saved}, tmp_path / "c")
    with pytest.raises(tensorkeep.StateMismatchError, match=r"rename the keys .* give it to load_state_dict"):
        tensorkeep.load(tmp_path / "c", into={"model": renamed})
    weights = tensorkeep.load(tmp_path / "c")["model"]
    renamed.load_state_dict({f"0.{name}": tensor for name, tensor in weights.items()})
    assert torch.equal(renamed[0].weight, saved.weight)
