"""Flattening and rebuilding states: every kind of value, every refusal, hostile skeletons."""

import dataclasses
import enum
import json
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tensorkeep.errors import UnsupportedError, UnsupportedLeafError, UsageError
from tensorkeep.state import registry
from tensorkeep.state.registry import register
from tensorkeep.state.skeleton_reader import MAX_DEPTH, LeafSpec
from tensorkeep.state.tree import flatten, leaf_specs, prune, unflatten
from tensorkeep.testing.equality import difference


def round_trip(state: Any) -> Any:
    flat = flatten(state)
    values = {name: leaf.array for name, leaf in flat.leaves.items()}
    return unflatten(json.loads(json.dumps(flat.skeleton, allow_nan=False)), values)


def assert_round_trip(state: Any) -> None:
    assert difference(state, round_trip(state)) is None


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


Loose = namedtuple("Loose", ["a", "b"])

NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF0_0000_0000_BEEF))[0]


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        0,
        2**53 - 1,
        2**53,
        -(2**53),
        3**20000,
        0.1,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        NAN,
        complex(-0.0, NAN),
        "",
        "\0ä\U0001f600",
        b"",
        b"\xff\0",
        bytearray(b"ab"),
        range(3, -(2**70), -2),
        [],
        (),
        {},
        OrderedDict(),
        set(),
        frozenset({1, "a", None, 2.5}),
        [1, [2, (3, [])]],
        {"b": 1, "a": 2},
        {1: "int", "1": "str", 2.0: "float", None: 0, False: 1, math.inf: 2, 2**80: 3},
        {True: "one", "True": 1},
        OrderedDict([(2, 0), ("a", 1)]),
        Loose(1, (2, 3)),
        Pair(torch.ones(2), "x"),
        Settings(0.5, torch.ones(2)),
        Color.RED,
        Color.CRIMSON,
        Color.BLUE,
        Mode.READ,
        Mode.READ | Mode.WRITE,
        Mode(0),
        torch.Size([2, 0]),
        torch.Size([]),
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.device("cuda", 3),
        torch.device("meta"),
        np.float32(1.5),
        np.bool_(True),
        np.array(3, "i2"),
        [np.zeros((2, 3)), torch.zeros(()), torch.zeros(2, requires_grad=True)],
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
    ],
    ids=lambda state: type(state).__name__,
)
def test_every_value_round_trips(state: Any) -> None:
    assert_round_trip(state)
    assert_round_trip({"a": [state]})


def test_enum_members_round_trip_to_the_same_objects() -> None:
    assert round_trip(Color.BLUE) is Color.BLUE


def test_unregistered_named_tuples_share_one_class() -> None:
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


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_states_round_trip_and_load(make: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = make(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.arange(6.0).reshape(2, 3)).square().sum()
        result.backward()
        return result

    for _ in range(2):
        optimizer.step(loss)
        scheduler.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "numpy_rng": np.random.default_rng(0).bit_generator.state,
    }
    back = round_trip(state)
    assert difference(state, back) is None
    assert back["model"]._metadata == state["model"]._metadata
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    assert difference(optimizer.state_dict(), state["optimizer"]) is None


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
    here = __name__
    assert flat.skeleton == {
        "dict": {
            "model": {"ordered": {"w": {"parameter": "model.w"}, "b": {"tensor": "model.b"}}},
            "optimizer": {
                "dict": {
                    "state": {
                        "items": [[0, {"dict": {"m": {"tensor": "optimizer.state.0.m", "requires_grad": True}}}]]
                    },
                    "betas": {"tuple": [{"float": "0.9"}, {"float": "nan:7ff8000000000000"}]},
                }
            },
            "misc": [
                None,
                True,
                7,
                {"int": "0x1000000000000000"},
                "s",
                {"complex": ["0.0", "1.0"]},
                {"bytes": "aGk="},
                {"bytearray": "aGk="},
                {"range": [0, 2, 1]},
                {"set": [1]},
                {"frozenset": []},
                {"size": [2]},
            ],
            "torch": [
                {"dtype": "int8"},
                {"device": "cpu"},
                {"npscalar": "torch.2"},
                {"ndarray": "torch.3"},
                {"tensor": "torch.4"},
            ],
            "made": [
                {"namedtuple": ["Loose", {"a": 1, "b": 2}]},
                {"enum": [f"{here}:Mode", 3]},
                {"enum": [f"{here}:Color", "RED"]},
                {"object": [f"{here}:Pair", {"left": 1, "right": 2}]},
            ],
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
    "tuple key": ({(1, 2): 1}, "key or set element of type tuple", "list of pairs"),
    "numpy key": ({np.int64(1): 1}, "key or set element of type int64", "use str"),
    "element": ({(1,)}, "key or set element of type tuple", "use str"),
    "sparse": (torch.eye(2).to_sparse(), "sparse", "to_dense"),
    "numpy objects": (np.array([None]), "numpy dtype object", "tolist"),
}


@pytest.mark.parametrize(("value", "message", "remedy"), REFUSED.values(), ids=REFUSED)
def test_each_unsupported_value_is_refused_with_its_key_and_a_remedy(value: Any, message: str, remedy: str) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten({"model": torch.zeros(1), "trainer": [0, {"callbacks": value, "later": object()}]})
    assert str(caught.value).startswith("key 'trainer.1.callbacks")
    assert message in caught.value.message
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy
    str(caught.value).encode()


def test_an_unsupported_state_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLeafError, match="the whole state"):
        flatten(object())


def test_an_unset_field_is_refused() -> None:
    broken = object.__new__(Settings)
    with pytest.raises(UnsupportedLeafError, match="key 'a': the field lr is not set"):
        flatten({"a": broken})


def nested(depth: int) -> Any:
    state: Any = 1.5
    for _ in range(depth):
        state = [state]
    return state


def test_nesting_deeper_than_the_limit_is_refused() -> None:
    assert_round_trip(nested(MAX_DEPTH))
    with pytest.raises(UnsupportedLeafError, match=r"key '0\.0\.0\.0': .*deeper than 128"):
        flatten(nested(MAX_DEPTH + 1))
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(UnsupportedLeafError, match="contains itself"):
        flatten(cycle)


@pytest.mark.parametrize("wrap", [lambda n: [n], lambda n: {"tuple": [n]}, lambda n: {"ordered": {"a": n}}])
def test_hostile_nesting_is_a_value_error(wrap: Any) -> None:
    skeleton: Any = None
    for _ in range(5000):
        skeleton = wrap(skeleton)
    for function in (leaf_specs, lambda s: unflatten(s, {}), lambda s: prune(s, [])):
        with pytest.raises(ValueError, match="deeper"):
            function(skeleton)


MALFORMED: list[Any] = [
    1.5,
    {},
    {"unknown": 1},
    {"dict": []},
    {"dict": {"a": 1.5}},
    {"dict": {}, "tuple": []},
    {"dict": {}, "_metadata": None},
    {"dict": {"\ud800": 1}},
    "\ud800",
    {"tuple": {}},
    {"items": {}},
    {"items": [[1]]},
    {"items": [[1, 2, 3]]},
    {"items": [1]},
    {"items": [[[], 1]]},
    {"items": [[{}, 1]]},
    {"items": [[1, 0], [True, 0]]},
    {"items": [[{"float": "1.0"}, 0], [1, 0]]},
    {"ordered_items": [[{"int": 5}, 1]]},
    {"ordered": {}, "extra": 1},
    {"int": 5},
    {"int": "5"},
    {"int": "0x_1"},
    {"int": "0x\u0661"},
    {"float": 1},
    {"float": "1_0.0"},
    {"float": "nan"},
    {"float": "nan:7ff0000000000000"},
    {"float": "nan:3ff0000000000000"},
    {"float": "infinity"},
    {"float": "\u0661.0"},
    {"complex": ["1.0"]},
    {"complex": "ab"},
    {"bytes": "a"},
    {"bytes": "a\n=="},
    {"bytes": "YQ==\n"},
    {"bytes": 1},
    {"bytearray": "\u00e9"},
    {"range": [0, 1, 0]},
    {"range": [0, 1]},
    {"range": [0, True, 1]},
    {"set": [[]]},
    {"set": [1, True]},
    {"size": [2**63]},
    {"size": ["1"]},
    {"size": [True]},
    {"dtype": "Tensor"},
    {"dtype": 5},
    {"device": "warp:1"},
    {"device": ""},
    {"namedtuple": ["P", []]},
    {"namedtuple": ["P()", {"a": 1}]},
    {"namedtuple": ["P", {"a, b": 1}]},
    {"namedtuple": ["P", {"_a": 1}]},
    {"namedtuple": ["P", {"class": 1}]},
    {"namedtuple": [1, {}]},
    {"object": ["x"]},
    {"object": [{}, {}]},
    {"enum": ["x"]},
    {"enum": ["x", None]},
    {"enum": [[], "A"]},
    {"tensor": 1},
    {"tensor": ""},
    {"tensor": "\ud800"},
    {"tensor": "a", "requires_grad": 1},
    {"tensor": "a", "ndarray": "b"},
    {"ndarray": "a", "requires_grad": True},
    {"npscalar": {}},
    [{"tensor": "a"}, {"tensor": "a"}],
]


@pytest.mark.parametrize("skeleton", MALFORMED, ids=ascii)
def test_malformed_skeletons_are_value_errors(skeleton: Any) -> None:
    for node in (skeleton, [skeleton], {"dict": {"k": skeleton}}, {"ordered": {}, "_metadata": skeleton}):
        with pytest.raises(ValueError, match=r"."):
            leaf_specs(node)
        with pytest.raises(ValueError, match=r"."):
            prune(node, [])
        with pytest.raises(ValueError, match=r"."):
            unflatten(node, {"a": torch.zeros(1), "b": np.zeros(1)})


@pytest.mark.parametrize(
    ("node", "value"),
    [
        ({"tensor": "a"}, np.zeros(1)),
        ({"ndarray": "a"}, torch.zeros(1)),
        ({"npscalar": "a"}, np.zeros(1)),
        ({"tensor": "a", "requires_grad": True}, torch.zeros(1, dtype=torch.int8)),
        ({"parameter": "a"}, torch.zeros(1, dtype=torch.bool)),
        ({"tensor": "b"}, torch.zeros(1)),
    ],
)
def test_data_that_does_not_match_the_skeleton_is_refused(node: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"leaf '[ab]'"):
        unflatten(node, {"a": value})


def test_existing_parameters_are_used_unchanged() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert unflatten({"parameter": "a"}, {"a": weight}) is weight
    assert type(unflatten({"tensor": "a"}, {"a": weight})) is torch.Tensor


def test_unregistered_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = flatten({"s": Settings(1.0, torch.ones(1)), "c": Color.RED}).skeleton
    assert list(leaf_specs(skeleton)) == ["s.weight"]
    monkeypatch.setattr(registry, "_CLASSES", {})
    assert list(leaf_specs(skeleton)) == ["s.weight"]
    with pytest.raises(UnsupportedError) as caught:
        unflatten(skeleton, {"s.weight": torch.ones(1)})
    assert str(caught.value).startswith(f"the state contains a {__name__}:Settings")
    assert "tensorkeep.register(Settings)" in str(caught.value.remedy)


@pytest.mark.parametrize(
    "node",
    [
        {"object": [f"{__name__}:Settings", {"lr": 1}]},
        {"object": [f"{__name__}:Pair", {"left": 1, "right": 2, "middle": 3}]},
        {"object": [f"{__name__}:Color", {}]},
        {"enum": [f"{__name__}:Pair", "RED"]},
        {"enum": [f"{__name__}:Color", "GREEN"]},
        {"enum": [f"{__name__}:Mode", 64]},
    ],
)
def test_changed_classes_are_refused(node: Any) -> None:
    leaf_specs(node)
    with pytest.raises(UnsupportedError, match=__name__):
        unflatten(node, {})


def test_only_dataclasses_enums_and_named_tuples_register() -> None:
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


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        (
            ["model.w"],
            {
                "model": {"ordered": {"w": {"tensor": "model.w"}, "n": 3}, "_metadata": {"dict": {}}},
                "config": {"dict": {"layers": [1, 2]}},
                "step": 7,
            },
        ),
        (
            ["optimizer.1", "list.2.x", "made.y"],
            {
                "optimizer": {"items": [[1, {"tuple": [{"tensor": "optimizer.1"}, 5]}]]},
                "config": {"dict": {"layers": [1, 2]}},
                "step": 7,
                "list": [None, {"float": "1.0"}, {"namedtuple": ["P", {"x": {"ndarray": "list.2.x"}, "y": 1}]}],
                "made": {"object": ["m:C", {"x": None, "y": {"tensor": "made.y"}}]},
            },
        ),
        (["list.0"], None),
        ([], {"config": {"dict": {"layers": [1, 2]}}, "step": 7}),
        (list(leaf_specs(SKELETON)), SKELETON["dict"]),
    ],
)
def test_pruning_keeps_the_selected_leaves(selected: list[str], expected: Any) -> None:
    pruned: Any = prune(SKELETON, selected)
    assert list(leaf_specs(pruned)) == [name for name in leaf_specs(SKELETON) if name in selected]
    if selected == ["list.0"]:
        assert pruned["dict"]["list"] == [{"tensor": "list.0"}, {"float": "1.0"}, None]
    else:
        assert pruned == {"dict": expected}
        assert list(pruned["dict"]) == list(expected)


def test_pruning_a_bare_tensor() -> None:
    assert prune({"tensor": "tensor"}, ["tensor"]) == {"tensor": "tensor"}
    assert prune({"tensor": "tensor"}, []) is None


def test_a_state_of_arrays_does_not_import_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from tensorkeep.state.tree import flatten, unflatten\n"
        "flat = flatten({'a': np.zeros(2), 'b': [1.5, np.float32(1)]})\n"
        "unflatten(flat.skeleton, {n: leaf.array for n, leaf in flat.leaves.items()})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
