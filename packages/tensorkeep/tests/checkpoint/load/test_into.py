"""Restoring training states: mismatches are named before anything is touched."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import tensorkeep
from checkpoint.load.loaded_objects import (
    CONVERTED,
    STATES,
    Anything,
    Captured,
    Doubled,
    SwappedLayers,
    Tied,
    norm,
    values,
    wrapped,
)
from faults.injection import flip_bit
from tensorkeep import CheckpointManager, RandomState
from tensorkeep.checkpoint.object_checks import unwrapped
from tensorkeep.checkpoint.stateful import unwrap_states, wrap_objects
from tensorkeep.testing.equality import same


def saved(state: Any, path: Path) -> Path:
    tensorkeep.save(state, path / "saved")
    return path / "saved"


def expand(state: Any) -> Any:
    return unwrap_states(wrap_objects(state))


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
    """Refuses its saved state only in load_state_dict, when it has taken it."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]
        if len(state["numbers"]) != 2:
            raise ValueError("two numbers are wanted")


class Copying(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow["w"].copy_(state["w"])


class OtherDevices(RandomState):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cuda": [torch.get_rng_state()] * (torch.cuda.device_count() + 7)}


def test_random_states_of_other_devices_can_be_left_out_and_are_refused_by_hand(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "rng": OtherDevices(), "step": 5}, tmp_path)
    model, numbers = linear(0), torch.get_rng_state()
    restored = tensorkeep.load(path, into={"model": model, "step": 0}, select=["model.*"])
    assert (list(restored), restored["step"]) == (["model", "step"], 5)
    assert restored["model"] is model
    assert is_filled(model, 1)
    assert torch.equal(torch.get_rng_state(), numbers)
    with pytest.raises(tensorkeep.UnsupportedError, match="CUDA devices"):
        RandomState().load_state_dict(OtherDevices().state_dict())


def test_an_object_takes_tensors_of_any_shape_if_it_has_none_or_checks_them_itself(tmp_path: Path) -> None:
    path = saved({"empty": Average(5, 2.0), "none": Average(3, 4.0), "checks": Buffer(50, 3.0)}, tmp_path)
    into = {"empty": Average(0), "none": Average(0), "checks": Buffer(2)}
    into["none"].shadow = {}
    tensorkeep.load(path, into=into)
    for name, size, value in (("empty", 5, 2.0), ("none", 3, 4.0), ("checks", 50, 3.0)):
        assert torch.equal(into[name].shadow["w"], torch.full((size,), value))
    assert into["checks"].seen == ("meta", (50,))


@pytest.mark.parametrize("name", STATES)
def test_an_object_takes_any_state_that_can_be_saved(tmp_path: Path, name: str) -> None:
    tensorkeep.save([{"it": Anything(STATES[name])}], tmp_path / "c")
    for given in [Anything(copy.deepcopy(STATES[name]))] + [Anything()] * (name != "objects"):
        assert tensorkeep.load(tmp_path / "c", into=[{"it": given}])[0]["it"] is given
        assert same(expand(given), expand(STATES[name]))


# Plain values


def test_plain_values_and_numpy_scalars_come_back_as_they_were_saved(tmp_path: Path) -> None:
    metrics, history = {"loss": 0.5, "best": [1, 2]}, [{}, {"a": 1}]
    values = {"step": 5, "metrics": metrics, "name": "run", "data": None, "history": history, "count": 3}
    values |= {"best": np.float64(0.25), "last": np.float32(0.5)}
    path = saved({"model": linear(1), **values}, tmp_path)
    given = {"step": 0, "metrics": {}, "name": None, "data": {"epoch": 3}, "history": [], "count": np.int64(0)}
    restored = tensorkeep.load(path, into={"model": linear(0), **given, "best": 0.0, "last": np.float32(0)})
    assert {key: restored[key] for key in values} == values
    assert type(restored["last"]) is np.float32


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
    path = saved(build(linear(1), given=False), tmp_path)
    restored = tensorkeep.load(path, into=build(model, given=True))["run"]
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

    def __init__(self, value: float, steps: int, width: int = 4) -> None:
        self.model = linear(value, width)
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
    tensorkeep.load(path, into={"holder": holder})
    assert (holder.model, holder.scheduler, holder.steps) == (model, scheduler, 3)
    assert is_filled(model, 1)
    assert scheduler.last_epoch == 3
    assert holder.optimizer.param_groups[0]["lr"] == 0.125


def test_an_object_that_contains_itself_and_a_class_are_refused(tmp_path: Path) -> None:
    class Endless(Average):
        def state_dict(self) -> dict[str, Any]:
            return {"self": self}

    for look in (expand, lambda state: saved(state, tmp_path)):
        with pytest.raises(tensorkeep.UnsupportedLeafError, match="nested deeper than 128 levels"):
            look({"endless": Endless(1)})
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="a value of type type cannot be saved"):
        saved({"model": nn.Linear}, tmp_path)


# Modules


def test_a_bare_module_is_a_state_and_a_flat_file_fits_a_nested_state(tmp_path: Path) -> None:
    tensorkeep.save_async(linear(2), tmp_path / "later").wait()
    for path, value in ((saved(linear(1), tmp_path), 1), (tmp_path / "later", 2)):
        model = linear(0)
        assert tensorkeep.load(path, into=model) is model
        assert is_filled(model, value)
    safetensors.torch.save_file({"model.w": torch.ones(2), "model.b": torch.ones(1)}, tmp_path / "a.safetensors")
    weight, bias = torch.zeros(2), torch.zeros(1)
    tensorkeep.load(tmp_path / "a.safetensors", into={"model": {"w": weight, "b": bias}})
    assert weight.sum() + bias.sum() == 3


def tied(value: float) -> dict[str, nn.Module]:
    encoder, decoder = linear(value), linear(value)
    decoder.weight = encoder.weight
    return {"encoder": encoder, "decoder": decoder}


def test_weights_tied_between_modules_and_one_module_under_two_keys(tmp_path: Path) -> None:
    path, other = saved(tied(1), tmp_path), tied(0)
    tensorkeep.load(path, into=other)
    assert other["decoder"].weight is other["encoder"].weight
    loose: dict[str, nn.Module] = {"encoder": linear(0), "decoder": linear(0)}
    tensorkeep.load(path, into=loose)
    assert all(is_filled(model, 1) for model in (*other.values(), *loose.values()))
    model, twice = linear(2), linear(0)
    tensorkeep.save({"model": model, "best": model}, tmp_path / "twice")
    restored = tensorkeep.load(tmp_path / "twice", into={"model": twice, "best": twice})
    assert restored["model"] is restored["best"] is twice
    assert is_filled(twice, 2)


def test_an_averaged_model_and_an_average_that_shares_memory_with_the_model(tmp_path: Path) -> None:
    averaged, other = (torch.optim.swa_utils.AveragedModel(linear(value)) for value in (1, 0))
    for _ in range(3):
        averaged.update_parameters(linear(1))
    path = saved({"averaged": averaged, "model": linear(1), "average": Average(4, 2.0)}, tmp_path)
    model, average = linear(0), Average(4)
    average.shadow["w"] = model.bias.detach()
    tensorkeep.load(path, into={"averaged": other, "model": model, "average": average})
    assert int(other.n_averaged) == 3
    assert is_filled(other.module, 1)
    assert is_filled(model, 1)
    assert torch.equal(average.shadow["w"], torch.full((4,), 2.0)), "it did not get memory of its own"


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
    tensorkeep.load(saved({"model": model}, tmp_path), into={"model": other})
    assert same(other[0].extra, model[0].extra)
    assert torch.equal(other[0].weight, model[0].weight)


# A part of it


def test_unselected_values_are_left_unchanged(tmp_path: Path) -> None:
    state = {"models": [linear(1), linear(2)], "average": Average(3, 4.0), "scheduler": scheduled(3)[1], "step": 9}
    path = saved(state, tmp_path)
    models, average, scheduler = [linear(0), linear(0)], Average(3), scheduled(0)[1]
    into = {"models": models, "average": average, "scheduler": scheduler, "new": torch.zeros(2)}
    restored = tensorkeep.load(path, into=into, select="models.1.*")
    assert is_filled(models[0], 0)
    assert is_filled(models[1], 2)
    assert not average.shadow["w"].any()
    assert scheduler.last_epoch == 0
    assert restored == {"models": models, "scheduler": scheduler, "step": 9}


@pytest.mark.parametrize("pattern", ["scheduler", "scheduler.*", "sch*", "*epoch"])
def test_objects_without_tensors_are_selected_by_their_keys(tmp_path: Path, pattern: str) -> None:
    path = saved({"model": linear(1), "scheduler": scheduled(3)[1]}, tmp_path)
    model, scheduler = linear(0), scheduled(0)[1]
    restored = tensorkeep.load(path, into={"model": model, "scheduler": scheduler}, select=pattern)
    assert scheduler.last_epoch == 3
    assert is_filled(model, 0)
    assert restored == {"scheduler": scheduler}


@pytest.mark.parametrize("selected", ["holder", "model"])
def test_tensors_of_an_object_are_selected_with_it(tmp_path: Path, selected: str) -> None:
    path = saved({"holder": Holder(1, 3), "model": linear(1)}, tmp_path)
    holder, model = Holder(0, 0), linear(0)
    tensorkeep.load(path, into={"holder": holder, "model": model}, select=f"{selected}.*")
    assert is_filled(holder.model, float(selected == "holder"))
    assert holder.scheduler.last_epoch == 3 * (selected == "holder")
    assert is_filled(model, float(selected == "model"))


def test_some_tensors_of_a_module_can_be_selected_but_not_of_another_object(tmp_path: Path) -> None:
    two = Average(3, 1.0)
    two.shadow["v"] = torch.ones(2)
    path = saved({"model": linear(1), "average": two}, tmp_path)
    model = linear(0)
    tensorkeep.load(path, into={"model": model, "average": Average(3)}, select="model.bias")
    assert not model.weight.any()
    assert bool((model.bias == 1).all())
    with pytest.raises(tensorkeep.UsageError, match="only some tensors of the Average at 'average' are selected"):
        tensorkeep.load(path, into={"model": model, "average": Average(3)}, select="average.w")
    assert list(tensorkeep.load(path, select="average.*")) == ["average"]


# Reading


def test_progress_covers_both_readings(tmp_path: Path) -> None:
    path = saved({"model": linear(1), "average": Average(5)}, tmp_path)
    empty = Average(0)
    seen: list[tuple[int, int]] = []
    tensorkeep.load(
        path, into={"model": linear(0), "average": empty}, progress=lambda done, total: seen.append((done, total))
    )
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
    flip_bit(tmp_path / "step-000002" / "model.safetensors", -5)
    into = training(3, 1 if used else 0)
    with pytest.raises(tensorkeep.CorruptCheckpointError):
        tensorkeep.load(tmp_path / "step-000002", into=into)
    assert into["scheduler"].last_epoch == 5, "it found the damage before it began"
    with pytest.warns(UserWarning, match="step-000002 is skipped"):
        restored = CheckpointManager(tmp_path).restore(into=into)
    assert same(expand(restored), expand(first))
    assert restored["model"] is into["model"]


# Entries of the top level that are not given


def used_adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def training_checkpoint(path: Path) -> Path:
    entries = {"mask": torch.ones(3), "best": np.float64(0.5), "step": 7}
    tensorkeep.save({"model": linear(1), "optimizer": used_adamw(linear(1)), **entries}, path / "run")
    return path / "run"


def test_objects_are_loaded_like_their_states_and_entries_that_are_not_given_are_left_alone(tmp_path: Path) -> None:
    path = training_checkpoint(tmp_path)
    model = linear(0)
    optimizer = torch.optim.AdamW(model.parameters())
    found = tensorkeep.load(path, into={"model": model, "optimizer": optimizer, "mask": torch.zeros(3), "step": 0})
    assert (found["model"], found["optimizer"], found["step"]) == (model, optimizer, 7)
    assert is_filled(model, 1)
    assert same(optimizer.state_dict(), tensorkeep.load(path)["optimizer"]), "a new AdamW takes the saved state"
    with tensorkeep.open(path) as checkpoint:
        for load in (partial(tensorkeep.load, path), checkpoint.load):
            model = linear(0)
            found = load(into={"model": model})
            assert found == {"model": model, "best": 0.5, "step": 7}
            assert found["model"] is model
            assert is_filled(model, 1)
    with pytest.raises(tensorkeep.UsageError, match="strict=False needs `into`"):
        tensorkeep.load(path, strict=False)


# What is not strict


def test_not_strict_loads_what_fits_and_names_the_rest(tmp_path: Path) -> None:
    saved_model = nn.ModuleDict({"body": linear(1), "head": nn.Linear(4, 2), "old": nn.Linear(1, 1)})
    tensorkeep.save({"model": saved_model, "average": linear(1).state_dict(), "step": 7}, tmp_path / "c")
    model = nn.ModuleDict({"body": linear(0), "head": nn.Linear(4, 3), "new": nn.Linear(1, 1)})
    head, average = model["head"].weight.detach().clone(), dict(nn.Linear(4, 4, bias=False).state_dict())
    with pytest.warns(tensorkeep.StateMismatchWarning) as caught:
        into = {"model": model, "average": average, "rng": RandomState()}
        found = tensorkeep.load(tmp_path / "c", into=into, strict=False)
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


def test_a_manager_restores_what_is_given_and_not_strict_warns_of_nothing_if_all_fits(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": linear(1), "optimizer": used_adamw(linear(1))}).wait()
        for options in ({}, {"strict": False}):
            model = linear(0)
            manager.restore(into={"model": model}, **options)
            assert is_filled(model, 1)


# What modules convert


@pytest.mark.parametrize("key", ["", "model."])
@pytest.mark.parametrize("name", CONVERTED)
def test_a_module_converts_what_was_saved_as_in_load_state_dict(tmp_path: Path, name: str, key: str) -> None:
    make, state, in_place = CONVERTED[name]
    expected, load = make(), nn.Module.load_state_dict
    own = {unwrapped(each): each for each in expected.state_dict()}
    renamed = {own.get(unwrapped(each), each): tensor for each, tensor in state.items()}
    expected.load_state_dict(renamed, strict=not isinstance(expected, Tied))
    with mock.patch.object(nn.Module, "load_state_dict", autospec=True, side_effect=load) as loads:
        for path in (tmp_path / "a.safetensors", tmp_path / "native"):
            tensorkeep.save({key + each: tensor for each, tensor in state.items()}, path)
            model = make()
            into = {"model": model} if key else model
            assert tensorkeep.load(path, into=into) == into
            found, taken = model.state_dict(), loads.call_args.args[1]
            assert same(dict(found), dict(expected.state_dict()))
            filled = {each for each in found if each in taken and taken[each].data_ptr() == found[each].data_ptr()}
            assert {*in_place} <= filled
            assert in_place or not filled


WITHOUT_MEMORY = [(nn.LazyLinear, "once on data"), (partial(nn.Linear, 2, device="meta"), "assign=True")]


@pytest.mark.parametrize(("make", "remedy"), WITHOUT_MEMORY)
def test_a_module_without_memory_is_answered_with_a_way_that_works(tmp_path: Path, make: Any, remedy: str) -> None:
    tensorkeep.save(nn.Linear(2, 3), tmp_path / "c")
    with pytest.raises(tensorkeep.UnsupportedLeafError, match=f"no memory to load into; .*\n.*{remedy}"):
        tensorkeep.load(tmp_path / "c", into=make(3))
    model = make(3)
    model.load_state_dict(tensorkeep.load(tmp_path / "c"), assign=True)
    assert model.weight.shape == (3, 2)


# What is refused


def case(name: str, state: Any, into: Any, message: str = "", names: Any = None, **options: Any) -> Any:
    """Return what is saved, what it is loaded into, a part of the message, names in the error, and other arguments."""
    return pytest.param(state, into, message, names or {}, options, id=name)


def beside(name: str, state: dict[str, Any], into: dict[str, Any], *rest: Any, **options: Any) -> Any:
    """Return a case with a model that fits."""
    return case(name, {"model": linear(1), **state}, {"model": linear(0), **into}, *rest, **options)


SCALERS = [{"scheduler": scheduled(3)[1], "scaler": torch.amp.GradScaler("cpu", enabled=on)} for on in (False, True)]
WIDER = "float32 [5, 5] in the state, float32 [4, 4] saved"
OPTIMIZER = {"optimizer": used_adamw(linear(1))}
OF_ONE = {"optimizer": torch.optim.AdamW([nn.Parameter(torch.zeros(4, 4))])}
COUNTS = {"run": {"model": linear(1), "counts": {"seen": 3}, "epoch": 7}, "models": [linear(1)]}
FLAT = {**linear(1).state_dict(), "optimizer": {"m": torch.ones(2)}, "step": 7}
ONE = {"model": linear(1)}
WITHOUT_BIAS = nn.Linear(4, 4, bias=False)

REFUSED = [
    beside("scaler", *SCALERS, "the GradScaler at 'scaler' does not accept", {"different": ("scaler",)}),
    beside("half way", {"picky": Picky([1, 2, 3])}, {"picky": Picky([8, 9])}, "two numbers are wanted"),
    beside("check", {"buffer": Buffer(101)}, {"buffer": Buffer(2)}, "buffer: more rows than it may hold"),
    beside("devices", {"rng": OtherDevices()}, {"rng": RandomState()}, "rng: holds the random states of"),
    beside("devices: remedy", {"rng": OtherDevices()}, {"rng": RandomState()}, 'select=["model.*"]'),
    beside("object", {"a": Average(5)}, {"a": Average(9)}, "a.w: float32 [9] in the state, float32 [5] saved"),
    beside("object that copies", {"a": Average(5)}, {"a": Copying(9)}, "a.w: float32 [9] in the state"),
    beside("inner object", {"h": Holder(1, 3)}, {"h": Holder(0, 0, width=5)}, f"h.inner.0.weight: {WIDER}"),
    beside("new entry", OPTIMIZER, {"best": 1.0}, "only in the state: best", {"missing": ("best",), "extra": ()}),
    beside("new object", {}, OPTIMIZER, "only in the state: optimizer"),
    case(
        "inner keys",
        COUNTS,
        {"run": {"model": linear(0), "step": 0}, "models": [linear(0), linear(0)]},
        names={"missing": ("run.step", "models.1"), "extra": ("run.counts", "run.epoch")},
    ),
    beside("list", {"v": {"w": torch.ones(2)}}, {"v": [torch.zeros(2)]}, "v: list in the state, dict saved"),
    beside("tensor", {"v": {"w": torch.ones(2)}}, {"v": torch.zeros(2)}, "v: tensor in the state, dict saved"),
    beside("None", {"v": {"w": torch.ones(2)}}, {"v": None}, "v: NoneType in the state, dict saved"),
    beside("integer", {"v": {"w": torch.ones(2)}}, {"v": {"w": 0}}, "v.w: int in the state, tensor saved"),
    beside("empty", {"v": {"w": torch.ones(2)}}, {"v": {}}, "only in the checkpoint: v.w"),
    beside("plain value", {"step": 5}, {"step": torch.tensor(0)}, "step: tensor in the state, int saved"),
    case("dict of tensors", FLAT, dict(WITHOUT_BIAS.state_dict()), names={"extra": ("bias",)}),
    case("wider module", linear(1), linear(0, width=5), f"weight: {WIDER}"),
    case("tied now", {"encoder": linear(1), "decoder": linear(2)}, tied(0), "shares memory"),
    case("extra state", {"model": Counting(4, 4)}, {"model": linear(0)}, names={"extra": ("model._extra_state",)}),
    case("no bias", ONE, {"model": WITHOUT_BIAS}, names={"extra": ("model.bias",)}),
    case("one tensor", ONE, {"model": {"weight": torch.zeros(4, 4)}}, names={"extra": ("model.bias",)}),
    beside("selected", {"a": Average(3)}, {}, names={"extra": ("a.w",)}, select=["model.*", "a.*"]),
    case("not strict: nothing", ONE, {"model": nn.ModuleList([linear(0)])}, "in the checkpoint: model", strict=False),
    case(
        "not strict: dtype",
        ONE,
        {"model": linear(0).double()},
        "convert the state to the saved dtype first",
        {"different": ("model.weight", "model.bias")},
        strict=False,
    ),
    beside(
        "not strict: part of an optimizer",
        OPTIMIZER,
        OF_ONE,
        "leave entries that do not fit out of `into`: only",
        {"different": ("optimizer",)},
        strict=False,
    ),
    case("remedy: alone", {**ONE, "step": 7}, linear(0), "the key that it was saved with: into={'model': ...}"),
    case("remedy: by key", linear(1), {"model": linear(0)}, "it was saved alone: give it to `into` without a key"),
    case("remedy: wrapped", ONE, {"model": dict(wrapped(linear(0)).state_dict())}, "one of the models is wrapped"),
    case("one more", values(norm()), norm(linear(0)), names={"missing": ("2.weight", "2.bias")}),
    case("in another dtype", {"weight": torch.ones(4, 4)}, Doubled(), "float32 in the state, float64 made from the"),
    case("cannot answer", {"a.weight": torch.ones(2, 2)}, SwappedLayers(reads=True), "read: load it without `into`,"),
    case("cannot answer, a closure", {"seen": torch.ones(5)}, Captured(), "read: load it without `into`,"),
    case("tied, saved apart", values(Tied()), Tied(), "is 'head.weight' in the state, and they were saved with"),
    case("remedy: mistyped", ONE, {"mdoel": linear(0), "step": 1}, "did you mean the key 'model'?"),
    case("remedy: wider", ONE, {"model": linear(0, width=5)}, "load only what fits (strict=False)"),
    case("remedy: half", ONE, {"model": linear(0).half()}, "saved dtype first (module.to(torch.float32))"),
    case("remedy: array", {"w": torch.ones(2)}, {"w": np.ones(2, np.float32)}, "entries that do not fit out"),
    case("remedy: list", ONE, [linear(0)], "give a dict with keys that were saved, such as into={'model': ...}"),
    case("unknown key", ONE, {"net": linear(0)}, "the keys that were saved are 'model'"),
    case("unknown key, not strict", ONE, {"net": linear(0)}, "the keys that were saved are 'model'", strict=False),
]


@pytest.mark.parametrize(("state", "into", "message", "names", "options"), REFUSED)
def test_what_does_not_fit_is_named_and_nothing_is_touched(
    tmp_path: Path, state: Any, into: Any, message: str, names: Any, options: dict[str, Any]
) -> None:
    path, before = saved(state, tmp_path), copy.deepcopy(expand(into))
    with pytest.raises(tensorkeep.StateMismatchError, match="nothing was touched") as raised:
        tensorkeep.load(path, into=into, **options)
    assert message in str(raised.value)
    assert all(getattr(raised.value, kind) == named for kind, named in names.items())
    assert same(expand(into), before)


def test_renamed_layers_are_answered_with_a_way_that_works(tmp_path: Path) -> None:
    saved, renamed = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    tensorkeep.save({"model": saved}, tmp_path / "c")
    with pytest.raises(tensorkeep.StateMismatchError, match=r"rename the keys .* give it to load_state_dict"):
        tensorkeep.load(tmp_path / "c", into={"model": renamed})
    weights = tensorkeep.load(tmp_path / "c")["model"]
    renamed.load_state_dict({f"0.{name}": tensor for name, tensor in weights.items()})
    assert torch.equal(renamed[0].weight, saved.weight)
