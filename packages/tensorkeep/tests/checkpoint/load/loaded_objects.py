"""Objects and modules with states that are hard to load.

``STATES`` are states that an object may have. ``CONVERTED`` has modules that load states of other names and shapes, as
older versions of them and other tools save them: a function that makes the module, what was saved, and the names of
the tensors that a load fills in place.
"""

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn


class Anything:
    """Its state is any value that can be saved."""

    def __init__(self, state: Any = None) -> None:
        self.shadow = state

    def state_dict(self) -> Any:
        return self.shadow

    def load_state_dict(self, state: Any) -> None:
        self.shadow = state


ONES = torch.ones(2)
STATES: dict[str, Any] = {
    "tensor": ONES,
    "parameter": nn.Parameter(ONES),
    "number": 3,
    "list": [ONES, None, [], 0.5],
    "counter": {"seen": Counter({"a": ONES, 3: 1})},
    "keys": {True: ONES, 1.5: ONES, None: ONES, -3: ONES, "1": ONES, 1 << 70: ONES, "": ONES},
    "names": {"a.b": ONES, "a": {"b": ONES, "": {".": ONES}}, "__metadata__": ONES, "\0/": ONES},
    "objects": (Anything({"x": Anything(ONES)}),),
}


def norm(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), *more)


class SwappedLayers(nn.Module):
    """An earlier version had the names of its layers the other way round, and a tensor that is no longer used."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.reads = nn.Linear(2, 2), nn.Linear(2, 2), reads
        self.register_load_state_dict_pre_hook(SwappedLayers.convert)  # type: ignore[no-untyped-call]

    def convert(self, state: dict[str, Any], *_: Any) -> None:
        assert not self.reads or float(state["a.weight"].sum()) != 0.5
        state.pop("old", None)
        for name in ("weight", "bias"):
            state[f"a.{name}"], state[f"b.{name}"] = state[f"b.{name}"], state[f"a.{name}"]


class Doubled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.register_load_state_dict_pre_hook(self._convert)  # type: ignore[no-untyped-call]

    def _convert(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update(weight=state["weight"].double())


class Captured(nn.Module):
    """Its hook is a closure, which sets the buffer of this very module, and of no copy."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(count))
        self._register_load_state_dict_pre_hook(self.make_hook())  # type: ignore[no-untyped-call]

    def make_hook(self) -> Callable[..., None]:
        return lambda state, *_: setattr(self, "seen", torch.empty_like(state["seen"]))


class ScalarParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.embedding, self.norm = nn.Linear(2, 5), nn.Embedding(5, 2), nn.BatchNorm1d(2)
        self.head.weight = self.embedding.weight


def wrapped(model: nn.Module) -> nn.Module:
    return nn.ModuleDict({"module": model})


def compiled(model: nn.Module) -> nn.Module:
    return nn.ModuleList([nn.ModuleDict({"_orig_mod": model})])


def values(model: nn.Module, *without: str, around: str = "", **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return random values for the tensors of a module, as another tool saves them."""
    state = {around + name: torch.rand(tensor.shape) for name, tensor in model.state_dict().items() if tensor.ndim}
    return {**{name: tensor for name, tensor in state.items() if not name.endswith(without)}, **more}


def make_old_norm() -> nn.Module:
    found: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    return found


OLD_NORM = {"weight_g": torch.rand(4, 1), "weight_v": torch.rand(4, 3), "bias": torch.rand(4)}
MINIMA = {"min_val": torch.rand(4), "max_val": torch.rand(4)}
PARTS = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
LINKED = ("embedding.weight", "head.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
HEADS, HEAD = ("embedding.weight", "head.weight"), torch.rand(5, 2)

CONVERTED: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor], Collection[str]]] = {
    "no count of batches": (norm, values(norm()), PARTS),
    "weights of another normalisation": (make_old_norm, OLD_NORM, ["bias"]),
    "swapped names": (SwappedLayers, values(SwappedLayers(), old=torch.ones(3)), []),
    "swapped names, with a look at the data": (partial(SwappedLayers, reads=True), values(SwappedLayers()), []),
    "resized": (torch.ao.quantization.PerChannelMinMaxObserver, MINIMA, []),
    "a hook that holds its module": (Captured, {"seen": torch.rand(2)}, []),
    "one value": (ScalarParameter, {"scale": torch.rand(1)}, []),
    "tied: the first name": (Tied, values(Tied(), "embedding.weight"), LINKED),
    "tied: the second name": (Tied, values(Tied(), "head.weight"), LINKED),
    "tied, of a wrapper": (Tied, values(Tied(), "head.weight", around="module."), LINKED),
    "tied, saved apart": (Tied, values(Tied()) | {name: HEAD.clone() for name in HEADS}, LINKED[1:]),
    "of a compiled wrapper": (norm, values(norm(), around="_orig_mod.module."), PARTS),
    "into a wrapper": (lambda: wrapped(norm()), values(norm()), [f"module.{name}" for name in PARTS]),
    "into compiled layers": (
        lambda: compiled(nn.Linear(4, 4)),
        values(nn.ModuleList([nn.Linear(4, 4)])),
        ["0._orig_mod.weight"],
    ),
}
