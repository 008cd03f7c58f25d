"""Names of leaves, parts and files, and selection by glob."""

import re
from fnmatch import fnmatchcase

import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.state.names import part_file_stem, part_file_stems, select
from tensorkeep.state.tree import flatten, unflatten
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference


def t() -> torch.Tensor:
    return torch.zeros(2)


def names(state: object) -> list[str]:
    flat = flatten(state)
    back = unflatten(flat.skeleton, {name: leaf.array for name, leaf in flat.leaves.items()})
    assert difference(state, back) is None
    relative = list(flat.parts.values())
    assert len(set(relative)) == len(relative)
    assert all(rest not in ("", "__metadata__") for _, rest in relative)
    return list(flat.leaves)


NATURAL: list[tuple[object, list[str]]] = [
    (t(), ["tensor"]),
    ([t(), (t(),)], ["0", "1.0"]),
    ({"layers.0.weight": t(), "layers.0.bias": t()}, ["layers.0.weight", "layers.0.bias"]),
    ({"a": {"b": t()}, "a.b": t()}, ["a.b", "a%2Eb"]),
    ({"a.b": t(), "a": {"b": t()}}, ["a%2Eb", "a.b"]),
    ({"a": {"b": t()}, "a.b": t(), "a%2Eb": t()}, ["a.b", "a%2Eb", "a%252Eb"]),
    ({1: t(), "1": t()}, ["%i1", "1"]),
    ({(1, "a.b"): t(), "(1, 'a.b')": t(), (): {0.5}}, ["%r(1, 'a%2Eb')", "(1, 'a%2Eb')"]),
    ({1: t(), "%i1": t()}, ["1", "%i1"]),
    ({1: t(), "1": t(), "%i1": t()}, ["%i1", "1", "%25i1"]),
    ({True: t(), "True": t(), None: t(), "None": t()}, ["%True", "True", "%None", "None"]),
    ({1.5: t(), "1.5": t(), 1: {5: t()}}, ["%r1%2E5", "1%2E5", "%i1.%i5"]),
    ({"": t()}, ["%"]),
    ({"": t(), "%": t()}, ["%", "%25"]),
    ({"a": {"": t()}, "a.": t()}, ["a.%", "a."]),
    ({"a\0b": t()}, ["a%00b"]),
    ({"__metadata__": t()}, ["%5F_metadata__"]),
    ({"model": {"__metadata__": t()}}, ["model.%5F_metadata__"]),
    ({"model": {"__metadata__": {"x": t()}}}, ["model.__metadata__.x"]),
    ({"a/b c": {"ä\n": t()}, "..": t()}, ["a/b c.ä\n", ".."]),
    ({10**5000: t()}, [hex(10**5000)]),
]


def test_names_are_natural_unless_ambiguous() -> None:
    for state, expected in NATURAL:
        with case(ascii(expected)[:80]):
            assert names(state) == expected
    # They do not depend on the order.
    forward = {"a": {"b": t()}, "a.b": t(), 1: t(), "1": t(), "c": t()}
    assert sorted(names(forward)) == sorted(names(dict(reversed(forward.items()))))


PARTS: list[tuple[object, dict[str, tuple[str, str]]]] = [
    # The containers at the top are the parts.
    (
        {"model": {"w.x": t()}, "optimizer": {"state": [t()]}},
        {"model.w.x": ("model", "w.x"), "optimizer.state.0": ("optimizer", "state.0")},
    ),
    # A plain state dict is one part, and so is a state that is not a dict.
    (
        torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict(),
        {f"0.{w}": ("model", f"0.{w}") for w in ("weight", "bias")},
    ),
    ({"w": t(), "ema": {"w": t()}}, {"w": ("model", "w"), "ema.w": ("ema", "w")}),
    ([t(), {"a": t()}], {"0": ("model", "0"), "1.a": ("model", "1.a")}),
    (t(), {"tensor": ("model", "tensor")}),
    # Loose tensors beside a model are the part top.
    ({"model": {"w": t()}, "scale": t()}, {"model.w": ("model", "w"), "scale": ("top", "scale")}),
    (
        {"model": {"w": t()}, "top": {"w": t()}, "scale": t()},
        {"model.w": ("model", "w"), "top.w": ("top", "w"), "scale": ("top_", "scale")},
    ),
    # Parts of equal text get different names.
    ({1: {"w": t()}, "1": {"w": t()}}, {"%i1.w": ("%i1", "w"), "1.w": ("1", "w")}),
]


def test_every_leaf_is_in_a_part() -> None:
    for state, expected in PARTS:
        assert flatten(state).parts == expected
    clash = {"a.b": {"c": {"d": t()}, "c.d": t(), "c%2Ed": t()}}
    assert names(clash)
    assert [part for part, _ in flatten(clash).parts.values()] == ["a.b"] * 3


def test_file_stems() -> None:
    stems = [
        ("model", "model"),
        ("My_part-2", "My_part-2"),
        ("a.b", "a%2Eb"),
        ("../etc", "%2E%2E%2Fetc"),
        (".hidden", "%2Ehidden"),
        ("", "%"),
        ("ä", "%C3%A4"),
        ("manifest", "%6Danifest"),
        ("MANIFEST", "%4DANIFEST"),
        ("model-00001-of-00002", "model%2D00001%2Dof%2D00002"),
    ]
    assert [(part, part_file_stem(part)) for part, _ in stems] == stems
    # Long ones, and those that differ in case only, remain distinct.
    stems = part_file_stems(["ä" * 100, "ä" * 99 + "a", "x" * 101])
    assert all(len(stem) <= 100 and set(stem) <= set("%-_") | set(map(chr, range(48, 123))) for stem in stems.values())
    assert len(set(stems.values())) == 3
    stems = part_file_stems(["Model", "model", "other"])
    assert stems["other"] == "other"
    assert len({stem.lower() for stem in stems.values()}) == 3


NAMES = ["model.a.weight", "model.b.weight", "model.b.bias", "optimizer.x[0]"]


def test_selection() -> None:
    for patterns, chosen in (
        ("model.*", NAMES[:3]),
        (["*.bias", "*.a.*"], [NAMES[0], NAMES[2]]),
        ("optimizer.x[0]", NAMES[3:]),
        ("model.?.bias", NAMES[2:3]),
        ("model.[!a].weight", NAMES[1:2]),
        ([], []),
    ):
        assert select(NAMES, patterns) == chosen, patterns
    # A name that is also a glob is only that name.
    assert select(["a[0].w", "a0.w", "odd*", "odd1"], ["a[0].w", "odd*"]) == ["a[0].w", "odd*"]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    for pattern, hint in (
        ("model.a.wieght", "'model.a.weight'"),
        ("model", "'model.*'"),
        ("MODEL.*", "model."),
        ("zzz", "its names look like"),
    ):
        with case(pattern):
            with pytest.raises(UsageError, match=f"no tensor matches '{re.escape(pattern)}'") as caught:
                select(NAMES, ["model.a.weight", pattern])
            assert hint in str(caught.value.remedy)
    with pytest.raises(UsageError, match="the checkpoint has no tensors"):
        select([], "*")


def test_many_exact_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [f"layers.{i}.weight" for i in range(20_000)] + ["odd[1]"]
    compared: list[str] = []

    def compare(name: str, pattern: str) -> bool:
        compared.append(name)
        return fnmatchcase(name, pattern)

    monkeypatch.setattr("tensorkeep.state.names.fnmatchcase", compare)
    assert select(candidates, candidates) == candidates
    assert not compared
