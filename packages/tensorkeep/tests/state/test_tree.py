"""Flattening and rebuilding states: every kind of value, every refusal, hostile skeletons."""

import dataclasses
import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tensorkeep.errors import UnsupportedError, UnsupportedLeafError, UsageError
from tensorkeep.state.skeleton import MAX_DEPTH, LeafSpec, register
from tensorkeep.state.tree import flatten, leaf_specs, prune, unflatten
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference


def round_trip(state: Any) -> Any:
    flat = flatten(state)
    values = {name: leaf.array for name, leaf in flat.leaves.items()}
    return unflatten(json.loads(json.dumps(flat.skeleton, allow_nan=False)), values)


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    lr: float
    weight: Any
    seen: int = dataclasses.field(default=0, init=False)


@register
class Pair(NamedTuple):
    left: Any
    right: Any


@register
class Color(enum.Enum):
    RED = "r"
    CRIMSON = "r"  # noqa: PIE796
    BLUE = object()


@register
class Mode(enum.Flag):
    READ = 1
    WRITE = 2


@register
class Ejecting(enum.Flag, boundary=enum.EJECT):
    READ = 1


Loose = namedtuple("Loose", ["a", "b"])

NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF0_0000_0000_BEEF))[0]


VALUES: list[Any] = [
    *(None, True, "", "\0ä\U0001f600", b"", b"\xff\0", bytearray(b"ab"), range(3, -(2**70), -2)),
    *(0, 2**53 - 1, 2**53, -(2**53), 3**20000),
    *(0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, NAN, complex(-0.0, NAN)),
    *([], (), {}, OrderedDict(), set(), frozenset({1, "a", None, 2.5}), [1, [2, (3, [])]], {"b": 1, "a": 2}),
    {1: "int", "1": "str", 2.0: "float", None: 0, False: 1, math.inf: 2, 2**80: 3},
    *({True: "one", "True": 1}, OrderedDict([(2, 0), ("a", 1)])),
    *(Loose(1, (2, 3)), Pair(torch.ones(2), "x"), Settings(0.5, torch.ones(2))),
    *(Color.RED, Color.CRIMSON, Color.BLUE, Mode.READ, Mode.READ | Mode.WRITE, Mode(0)),
    *(torch.Size([2, 0]), torch.Size([]), torch.bfloat16, torch.float8_e4m3fn),
    *(torch.device("cuda", 3), torch.device("meta")),
    *(np.float32(1.5), np.bool_(True), np.array(3, "i2")),
    [np.zeros((2, 3)), torch.zeros(()), torch.zeros(2, requires_grad=True)],
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
]


def test_every_value_round_trips() -> None:
    for state in VALUES:
        with case(type(state).__name__):
            assert difference(state, round_trip(state)) is None
            assert difference({"a": [state]}, round_trip({"a": [state]})) is None
    # Members of enums and the classes of named tuples are the same objects.
    assert round_trip(Color.BLUE) is Color.BLUE
    a, b = round_trip([Loose(1, 2), Loose(3, 4)])
    assert type(a) is type(b)
    assert (type(a).__name__, a._fields, a) == ("Loose", ("a", "b"), (1, 2))


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "SGD": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "LBFGS": torch.optim.LBFGS,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
}


def test_optimizer_states_round_trip_and_load() -> None:
    for name, make in OPTIMIZERS.items():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = make(list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def loss(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            result = model(torch.arange(6.0).reshape(2, 3)).square().sum()
            result.backward()
            return result

        for _ in range(2):
            optimizer.step(loss)
            scheduler.step()
        state = {each: value.state_dict() for each, value in (("m", model), ("o", optimizer), ("s", scheduler))}
        state |= {"rng": torch.get_rng_state(), "numpy_rng": np.random.default_rng(0).bit_generator.state}
        with case(name):
            back = round_trip(state)
            assert difference(state, back) is None
            assert back["m"]._metadata == state["m"]._metadata
            model.load_state_dict(back["m"])
            optimizer.load_state_dict(back["o"])
            assert difference(optimizer.state_dict(), state["o"]) is None


def test_the_json_of_a_skeleton() -> None:
    """The on-disk form, which every later version must read."""
    weight = torch.nn.Parameter(torch.ones(1))
    state = {
        "model": OrderedDict(w=weight, b=torch.zeros(1)),
        "optimizer": {"state": {0: {"m": torch.zeros(1, requires_grad=True)}}, "betas": (0.9, math.nan)},
        "misc": [None, True, 7, 2**60, "s", 1j, b"hi", bytearray(b"hi"), range(2), {1}, frozenset(), torch.Size([2])],
        "torch": [torch.int8, torch.device("cpu"), np.float32(1), np.zeros(1), weight.detach()],
        "made": [Loose(1, 2), Mode(3), Color.CRIMSON, Pair(1, 2)],
        "odd": OrderedDict({2.5: 1}),
    }
    flat = flatten(state)
    moment = {"dict": {"m": {"tensor": "optimizer.state.0.m", "requires_grad": True}}}
    betas = {"tuple": [{"float": "0.9"}, {"float": "nan:7ff8000000000000"}]}
    plain = [None, True, 7, {"int": "0x1000000000000000"}, "s", {"complex": ["0.0", "1.0"]}]
    more = [{"bytes": "aGk="}, {"bytearray": "aGk="}, {"range": [0, 2, 1]}, {"set": [1]}, {"frozenset": []}]
    values = [{"npscalar": "torch.2"}, {"ndarray": "torch.3"}, {"tensor": "torch.4"}]
    enums = [{"enum": [f"{__name__}:Mode", 3]}, {"enum": [f"{__name__}:Color", "RED"]}]
    pair = {"object": [f"{__name__}:Pair", {"left": 1, "right": 2}]}
    assert flat.skeleton == {
        "dict": {
            "model": {"ordered": {"w": {"parameter": "model.w"}, "b": {"tensor": "model.b"}}},
            "optimizer": {"dict": {"state": {"items": [[0, moment]]}, "betas": betas}},
            "misc": [*plain, *more, {"size": [2]}],
            "torch": [{"dtype": "int8"}, {"device": "cpu"}, *values],
            "made": [{"namedtuple": ["Loose", {"a": 1, "b": 2}]}, *enums, pair],
            "odd": {"ordered_items": [[{"float": "2.5"}, 1]]},
        }
    }
    assert leaf_specs(flat.skeleton)["optimizer.state.0.m"] == LeafSpec("tensor", True)
    assert list(leaf_specs(flat.skeleton)) == [*list(flat.leaves), *flat.aliases]


@dataclasses.dataclass
class Unregistered:
    x: int


class Shade(enum.IntEnum):
    DARK = 1


class Hooked(OrderedDict):  # type: ignore[type-arg]
    pass


def with_attribute() -> Any:
    ordered: Any = OrderedDict(a=1)
    ordered.note = "lost"
    return ordered


REFUSED: dict[str, tuple[Any, str, str]] = {
    "defaultdict": (defaultdict(list), "type defaultdict", "dict(x)"),
    "dict subclass": (Hooked(), "type Hooked", "dict(x)"),
    "OrderedDict attribute": (with_attribute(), "note", "dict(x)"),
    "str subclass": (enum.StrEnum("S", ["A"]).A, "type S", "tensorkeep.register(S)"),
    "dataclass": (Unregistered(1), "type Unregistered", "tensorkeep.register(Unregistered)"),
    "enum": (Shade.DARK, "type Shade", "tensorkeep.register(Shade)"),
    "module": (torch.nn.Linear(1, 1), "type Linear", "state_dict()"),
    "optimizer": (torch.optim.SGD([torch.zeros(1)]), "type SGD", "state_dict()"),
    "lambda": (lambda: None, "type function", "code"),
    "class": (Unregistered, "type type", "code"),
    "object": (object(), "type object", "leave it out"),
    "generator": ((x for x in ()), "type generator", "leave it out"),
    "torch result": (torch.max(torch.zeros(1, 1), 0), "type max", "tuple(x)"),
    "renamed tuple": (namedtuple("R", ["def"], rename=True)(1), "named tuple R", "tensorkeep.register(R)"),
    "surrogate": ("a\ud800", "surrogate", "bytes"),
    "surrogate key": ({"a\ud800": 1}, "surrogate", "bytes"),
    "nested key": ({(1, (2,)): 1}, "key or set element of type tuple", "list of pairs"),
    "numpy key": ({np.int64(1): 1}, "key or set element of type int64", "use str"),
    "element": ({b"x"}, "key or set element of type bytes", "use str"),
    "sparse": (torch.eye(2).to_sparse(), "sparse", "to_dense"),
    "numpy objects": (np.array([None]), "numpy dtype object", "tolist"),
}


def test_each_unsupported_value_is_refused_with_its_key_and_a_remedy() -> None:
    for label, (value, message, remedy) in REFUSED.items():
        with case(label):
            with pytest.raises(UnsupportedLeafError) as caught:
                flatten({"model": torch.zeros(1), "trainer": [0, {"callbacks": value, "later": object()}]})
            assert str(caught.value).startswith("key 'trainer.1.callbacks")
            assert message in caught.value.message
            assert remedy in (caught.value.remedy or "")
            str(caught.value).encode()


def nested(depth: int) -> Any:
    state: Any = 1.5
    for _ in range(depth):
        state = [state]
    return state


def test_states_that_are_unsupported_as_a_whole_or_nested_too_deep_are_refused() -> None:
    assert difference(nested(MAX_DEPTH), round_trip(nested(MAX_DEPTH))) is None
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    for state, message in (
        (object(), "the whole state"),
        ({"a": object.__new__(Settings)}, "key 'a': the field lr is not set"),
        (nested(MAX_DEPTH + 1), r"key '0\.0\.0\.0': .*deeper than 128"),
        (cycle, "contains itself"),
    ):
        with case(message), pytest.raises(UnsupportedLeafError, match=message):
            flatten(state)


def test_hostile_nesting_is_a_value_error() -> None:
    for wrap in (lambda n: [n], lambda n: {"tuple": [n]}, lambda n: {"ordered": {"a": n}}):
        skeleton: Any = None
        for _ in range(5000):
            skeleton = wrap(skeleton)
        for function in (leaf_specs, lambda s: unflatten(s, {}), lambda s: prune(s, [])):
            with pytest.raises(ValueError, match="deeper"):
                function(skeleton)


# Values that the node of a tag cannot have.
MALFORMED: dict[str, list[Any]] = {
    "unknown": [1],
    "dict": [[], {"a": 1.5}, {"\ud800": 1}],
    "tuple": [{}],
    "items": [{}, [[1]], [[1, 2, 3]], [1], [[[], 1]], [[{}, 1]], [[1, 0], [True, 0]], [[{"float": "1.0"}, 0], [1, 0]]],
    "ordered_items": [[[{"int": 5}, 1]]],
    "int": [5, "5", "0x_1", "0x\u0661"],
    "float": [1, "1_0.0", "nan", "nan:7ff0000000000000", "nan:3ff0000000000000", "infinity", "\u0661.0"],
    "complex": [["1.0"], "ab"],
    "bytes": ["a", "a\n==", "YQ==\n", 1],
    "bytearray": ["\u00e9"],
    "range": [[0, 1, 0], [0, 1], [0, True, 1]],
    "set": [[[]], [1, True]],
    "size": [[2**63], ["1"], [True]],
    "dtype": ["Tensor", 5],
    "device": ["warp:1", ""],
    "namedtuple": [["P", []], ["P()", {"a": 1}], ["P", {"a, b": 1}], ["P", {"_a": 1}], ["P", {"class": 1}], [1, {}]],
    "object": [["x"], [{}, {}]],
    "enum": [["x"], ["x", None], [[], "A"]],
    "tensor": [1, "", "\ud800"],
    "npscalar": [{}],
}
MALFORMED_NODES: list[Any] = [
    *({tag: value} for tag, values in MALFORMED.items() for value in values),
    *(1.5, {}, "\ud800", [{"tensor": "a"}, {"tensor": "a"}]),
    *({"dict": {}, "tuple": []}, {"dict": {}, "_metadata": None}, {"ordered": {}, "extra": 1}),
    *({"tensor": "a", "requires_grad": 1}, {"tensor": "a", "ndarray": "b"}, {"ndarray": "a", "requires_grad": True}),
]


def test_malformed_skeletons_are_value_errors() -> None:
    values = {"a": torch.zeros(1), "b": np.zeros(1)}
    for skeleton in MALFORMED_NODES:
        for node in (skeleton, [skeleton], {"dict": {"k": skeleton}}, {"ordered": {}, "_metadata": skeleton}):
            for function in (leaf_specs, lambda node: prune(node, []), lambda node: unflatten(node, values)):
                with case(ascii(node)), pytest.raises(ValueError, match=r"."):
                    function(node)


def test_data_that_matches_the_skeleton_is_used_and_other_data_refused() -> None:
    for node, value in (
        ({"tensor": "a"}, np.zeros(1)),
        ({"ndarray": "a"}, torch.zeros(1)),
        ({"npscalar": "a"}, np.zeros(1)),
        ({"tensor": "a", "requires_grad": True}, torch.zeros(1, dtype=torch.int8)),
        ({"parameter": "a"}, torch.zeros(1, dtype=torch.bool)),
        ({"tensor": "b"}, torch.zeros(1)),
    ):
        with case(node), pytest.raises(ValueError, match=r"leaf '[ab]'"):
            unflatten(node, {"a": value})
    # A parameter is used unchanged.
    weight = torch.nn.Parameter(torch.ones(2))
    assert unflatten({"parameter": "a"}, {"a": weight}) is weight
    assert type(unflatten({"tensor": "a"}, {"a": weight})) is torch.Tensor


def test_unregistered_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = flatten({"s": Settings(1.0, torch.ones(1)), "c": Color.RED}).skeleton
    assert list(leaf_specs(skeleton)) == ["s.weight"]
    monkeypatch.setattr("tensorkeep.state.skeleton._CLASSES", {})
    assert list(leaf_specs(skeleton)) == ["s.weight"]
    with pytest.raises(UnsupportedError) as caught:
        unflatten(skeleton, {"s.weight": torch.ones(1)})
    assert str(caught.value).startswith(f"the state contains a {__name__}:Settings")
    assert "tensorkeep.register(Settings)" in str(caught.value.remedy)


def test_changed_classes_are_refused_and_others_do_not_register() -> None:
    for tag, name, content in (
        ("object", "Settings", {"lr": 1}),
        ("object", "Pair", {"left": 1, "right": 2, "middle": 3}),
        ("object", "Color", {}),
        ("enum", "Pair", "RED"),
        ("enum", "Color", "GREEN"),
        ("enum", "Mode", 64),
        ("enum", "Ejecting", 64),
    ):
        node = {tag: [f"{__name__}:{name}", content]}
        leaf_specs(node)
        with case(node), pytest.raises(UnsupportedError, match=__name__):
            unflatten(node, {})

    @dataclasses.dataclass
    class Mapping(dict):  # type: ignore[type-arg]
        x: int

    for cls in (dict, object, Counter, Mapping, 3):
        with pytest.raises(UsageError, match="cannot be registered"):
            register(cls)  # type: ignore[type-var]


SKELETON = {
    "dict": {
        "model": {
            "ordered": {"w": {"tensor": "model.w"}, "n": 3, "b": {"tensor": "model.b"}},
            "_metadata": {"dict": {}},
        },
        "optimizer": {"items": [[0, {"tensor": "optimizer.0"}], [1, {"tuple": [{"tensor": "optimizer.1"}, 5]}]]},
        "config": {"dict": {"layers": [1, 2]}},
        "step": 7,
        "list": [{"tensor": "list.0"}, {"float": "1.0"}, {"namedtuple": ["P", {"x": {"ndarray": "list.2.x"}, "y": 1}]}],
        "made": {"object": ["m:C", {"x": {"tensor": "made.x"}, "y": {"tensor": "made.y"}}]},
    }
}


PLAIN = {"config": {"dict": {"layers": [1, 2]}}, "step": 7}
PRUNED: list[tuple[list[str], dict[str, Any]]] = [
    (["model.w"], {"model": {"ordered": {"w": {"tensor": "model.w"}, "n": 3}, "_metadata": {"dict": {}}}, **PLAIN}),
    (
        ["optimizer.1", "list.2.x", "made.y"],
        {
            "optimizer": {"items": [[1, {"tuple": [{"tensor": "optimizer.1"}, 5]}]]},
            **PLAIN,
            "list": [None, {"float": "1.0"}, {"namedtuple": ["P", {"x": {"ndarray": "list.2.x"}, "y": 1}]}],
            "made": {"object": ["m:C", {"x": None, "y": {"tensor": "made.y"}}]},
        },
    ),
    (["list.0"], {**PLAIN, "list": [{"tensor": "list.0"}, {"float": "1.0"}, None]}),
    ([], PLAIN),
    (list(leaf_specs(SKELETON)), SKELETON["dict"]),
]


def test_pruning_keeps_the_selected_leaves() -> None:
    for selected, expected in PRUNED:
        with case(selected):
            pruned: Any = prune(SKELETON, selected)
            assert list(leaf_specs(pruned)) == [name for name in leaf_specs(SKELETON) if name in selected]
            assert pruned == {"dict": expected}
            assert list(pruned["dict"]) == list(expected)
    assert prune({"tensor": "tensor"}, ["tensor"]) == {"tensor": "tensor"}
    assert prune({"tensor": "tensor"}, []) is None
