"""Plain values that later versions added, and registered classes of any kind."""

import argparse
import dataclasses
import datetime
import enum
import uuid
from collections import OrderedDict, deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorkeep
from state.reloading import reload
from tensorkeep.formats.native import manifest
from tensorkeep.state.tree import flatten, has_later_nodes, leaf_specs

ZONES = st.none() | st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone)
ENDS = st.none() | st.integers()
VALUES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(Path),
    st.datetimes(timezones=ZONES).map(lambda moment: moment.replace(fold=0)),
    st.dates(),
    st.times(timezones=ZONES).map(lambda time: time.replace(fold=0)),
    st.timedeltas(),
    st.builds(slice, ENDS, ENDS, ENDS),
)
NESTED = st.recursive(VALUES | st.integers(), lambda items: st.builds(deque, st.lists(items), st.none() | st.just(9)))


@given(NESTED)
def test_values_round_trip(value: Any) -> None:
    skeleton = flatten({"value": value}).skeleton
    found = reload(flatten({"value": value}))["value"]
    assert type(found) is type(value)
    assert found == value
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert has_later_nodes(skeleton) == (type(value) is not int)


@pytest.mark.parametrize(
    "node",
    [
        {"path": 3},
        {"datetime": "2026-01-01"},
        {"datetime": "20260101T000000"},
        {"date": "2026-02-30"},
        {"time": ""},
        {"timedelta": [10**12, 0, 0]},
        {"timedelta": [0, 0]},
        {"slice": [1, 2]},
        {"slice": [1.5, 2, 3]},
        {"deque": [1, [1, 2]]},
        {"deque": [-1, []]},
        {"deque": [{"int": hex(2**70)}, []]},
        {"deque": [None, 3]},
    ],
    ids=str,
)
def test_malformed_nodes_are_refused(node: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        leaf_specs(node)


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 10, 25, 2, 30, fold=1),
        datetime.datetime(2026, 1, 1, tzinfo=type("Named", (datetime.tzinfo,), {})()),
        datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")),
        slice("a", None),
        Path("\ud800"),
    ],
    ids=["fold", "zone", "name of an offset", "slice", "path"],
)
def test_values_that_would_change_are_refused(value: Any) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError, match=r"."):
        flatten({"value": value})


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_reader_that_lacks_them_names_the_version(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(2), "folder": Path("data")}
    tensorkeep.save(state, tmp_path / "new", format=format)
    tensorkeep.save({"w": torch.ones(2)}, tmp_path / "old", format=format)
    assert tensorkeep.load(tmp_path / "new")["folder"] == Path("data")
    # As before the feature was known.
    monkeypatch.setattr(manifest, "LATER_VALUES", "unknown")
    monkeypatch.setattr("tensorkeep.formats.sidecar._WITH_LATER_NODES", 1)
    assert tensorkeep.load(tmp_path / "old").keys() == {"w"}
    with pytest.raises(tensorkeep.UnsupportedError, match="install a later Tensorkeep"):
        tensorkeep.load(tmp_path / "new")


def test_a_value_in_the_attribute_of_an_ordered_dict_counts() -> None:
    state: OrderedDict[str, Any] = OrderedDict(w=1)
    state._metadata = {"folder": Path("data")}
    assert has_later_nodes(flatten({"model": state}).skeleton)


def test_tensors_in_a_deque_are_filled_in_place(tmp_path: Path) -> None:
    tensorkeep.save({"window": deque([torch.ones(2), torch.zeros(2)], 3)}, tmp_path / "a")
    given = deque([torch.zeros(2), torch.ones(2)], 3)
    loaded = tensorkeep.load(tmp_path / "a", into={"window": given})["window"]
    assert loaded[0] is given[0]
    assert loaded.maxlen == 3
    assert torch.equal(given[0], torch.ones(2))
    pruned = tensorkeep.load(tmp_path / "a", select="window.1")["window"]
    assert pruned[0] is None


@tensorkeep.register
class Tracker:
    """A class with attributes, a property and no state_dict."""

    def __init__(self, scale: float) -> None:
        self.weight = torch.full((2,), scale)
        self.history = {"best": scale}
        self.calls = 0

    @property
    def best(self) -> float:
        """A property, which no load calls."""
        raise AssertionError

    @best.setter
    def best(self, value: float) -> None:
        raise AssertionError


@tensorkeep.register
class Slotted:
    """A class without a dict, with a private slot."""

    __slots__ = ("__hidden", "shown")

    def __init__(self) -> None:
        self.shown, self.__hidden = 1, 2

    @property
    def both(self) -> tuple[int, int]:
        """All that it holds."""
        return self.shown, self.__hidden


class Table(dict):  # type: ignore[type-arg]
    """Contents that are no attributes."""


tensorkeep.register(argparse.Namespace)
tensorkeep.register(Fraction, to_state=str, from_state=Fraction)
tensorkeep.register(uuid.UUID, to_state=lambda each: each.bytes, from_state=lambda state: uuid.UUID(bytes=state))
tensorkeep.register(Table, to_state=dict, from_state=Table)


def test_registered_classes_round_trip() -> None:
    config = argparse.Namespace(lr=0.1, layers=[1, 2])
    table, number = Table(a=torch.ones(1)), uuid.UUID(int=7)
    state = {"c": config, "t": Tracker(2.0), "s": Slotted(), "f": Fraction(1, 3), "table": table, "id": number}
    found = reload(flatten(state))
    assert found["c"] == config
    assert found["s"].both == (1, 2)
    assert (found["f"], found["id"]) == (Fraction(1, 3), number)
    assert type(found["table"]) is Table
    assert torch.equal(found["table"]["a"], table["a"])
    assert vars(found["t"]).keys() == {"weight", "history", "calls"}


def test_registered_objects_are_filled_in_place(tmp_path: Path) -> None:
    tensorkeep.save({"t": Tracker(2.0), "table": Table(a=torch.ones(1))}, tmp_path / "a")
    tracker, table = Tracker(1.0), Table(a=torch.zeros(1))
    loaded = tensorkeep.load(tmp_path / "a", into={"t": tracker, "table": table})
    assert loaded["t"].history == {"best": 2.0}
    assert loaded["t"].weight is tracker.weight
    assert torch.equal(tracker.weight, torch.full((2,), 2.0))
    assert loaded["table"]["a"] is table["a"]


def test_a_file_sets_no_property_of_a_registered_class() -> None:
    node = {"object": [f"{__name__}:Tracker", {"best": 3, "__class__": "x"}]}
    flat = flatten({"t": Tracker(1.0)})
    found = reload(dataclasses.replace(flat, skeleton=node, leaves={}, parts={}))
    assert vars(found) == {"best": 3, "__class__": "x"}
    assert type(found) is Tracker


def test_classes_without_attributes_need_functions() -> None:
    for cls in (object, dict, type("Sub", (list,), {}), int, type(lambda: 0)):
        with pytest.raises(tensorkeep.UsageError, match="cannot be registered"):
            tensorkeep.register(cls)
    with pytest.raises(tensorkeep.UsageError, match="belong together"):
        tensorkeep.register(dict, to_state=dict)


def test_an_unregistered_class_names_the_remedy() -> None:
    class Plain:
        x = 1

    with pytest.raises(tensorkeep.UnsupportedLeafError, match=r"tensorkeep\.register\(Plain\)"):
        flatten({"value": Plain()})
    with pytest.raises(tensorkeep.UnsupportedLeafError, match="code cannot be saved"):
        flatten({"value": enum.auto})


def test_no_instance_is_made_of_a_refused_class_that_would_end_it() -> None:
    ended = []

    class Resource:
        def __del__(self) -> None:
            ended.append(self)

    kept = Resource()
    with pytest.raises(tensorkeep.UnsupportedLeafError):
        flatten({"value": kept})
    assert not ended


class Sheet:
    """A class that is saved by functions, and holds a tensor and a generator."""

    def __init__(self, rows: torch.Tensor, generator: torch.Generator) -> None:
        self.rows, self.generator = rows, generator


def test_objects_with_functions_load_into_a_state(tmp_path: Path) -> None:
    tensorkeep.register(
        Sheet,
        to_state=lambda table: {"rows": table.rows, "generator": table.generator},
        # Of tensors, also while the state is compared.
        from_state=lambda state: Sheet(state["rows"].clone(), state["generator"]),
    )

    class Holder:
        table = Sheet(torch.zeros(3), torch.Generator())

        def state_dict(self) -> dict[str, Any]:
            return {"table": self.table}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.table = state["table"]

    first, other = Holder(), Holder()
    first.table = Sheet(torch.ones(3), torch.Generator().manual_seed(5))
    state = {
        "table": Sheet(torch.arange(3.0), torch.Generator().manual_seed(7)),
        "holder": first,
        "part": Fraction(1, 3),
    }
    tensorkeep.save(state, tmp_path / "a")
    into = {"table": Sheet(torch.zeros(3), torch.Generator()), "holder": other, "part": Fraction(0)}
    loaded = tensorkeep.load(tmp_path / "a", into=into)
    assert loaded["part"] == Fraction(1, 3)
    assert torch.equal(loaded["table"].rows, torch.arange(3.0))
    assert loaded["table"].generator is into["table"].generator
    assert loaded["table"].generator.initial_seed() == 7
    assert torch.equal(other.table.rows, torch.ones(3))


@pytest.mark.parametrize("into", [None, {"part": Fraction(0)}])
def test_what_a_function_does_not_take_names_the_file(into: Any, tmp_path: Path) -> None:
    tensorkeep.register(Fraction, to_state=lambda part: "1/0", from_state=Fraction)
    tensorkeep.save({"part": Fraction(1)}, tmp_path / "a")
    tensorkeep.register(Fraction, to_state=str, from_state=Fraction)
    with pytest.raises(tensorkeep.UnsupportedError, match="a: `from_state` of fractions:Fraction does not take"):
        tensorkeep.load(tmp_path / "a", into=into)
