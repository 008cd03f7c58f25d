"""Names of leaves, parts and files, and selection by glob."""

import time

import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.state.names import part_file_stem, part_file_stems, select
from tensorkeep.state.tree import flatten, unflatten
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


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (t(), ["tensor"]),
        ([t(), (t(),)], ["0", "1.0"]),
        ({"layers.0.weight": t(), "layers.0.bias": t()}, ["layers.0.weight", "layers.0.bias"]),
        ({"a": {"b": t()}, "a.b": t()}, ["a.b", "a%2Eb"]),
        ({"a.b": t(), "a": {"b": t()}}, ["a%2Eb", "a.b"]),
        ({"a": {"b": t()}, "a.b": t(), "a%2Eb": t()}, ["a.b", "a%2Eb", "a%252Eb"]),
        ({1: t(), "1": t()}, ["%i1", "1"]),
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
    ],
)
def test_names_are_natural_unless_ambiguous(state: object, expected: list[str]) -> None:
    assert names(state) == expected


def test_names_do_not_depend_on_the_order() -> None:
    forward = {"a": {"b": t()}, "a.b": t(), 1: t(), "1": t(), "c": t()}
    assert sorted(names(forward)) == sorted(names(dict(reversed(forward.items()))))


def parts(state: object) -> dict[str, tuple[str, str]]:
    return flatten(state).parts


def test_parts_are_the_containers_at_the_top() -> None:
    assert parts({"model": {"w.x": t()}, "optimizer": {"state": [t()]}}) == {
        "model.w.x": ("model", "w.x"),
        "optimizer.state.0": ("optimizer", "state.0"),
    }


def test_a_plain_state_dict_is_one_part() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert parts(linear.state_dict()) == {"0.weight": ("model", "0.weight"), "0.bias": ("model", "0.bias")}
    assert parts({"w": t(), "ema": {"w": t()}}) == {"w": ("model", "w"), "ema.w": ("ema", "w")}


def test_loose_tensors_beside_a_model_are_the_part_top() -> None:
    assert parts({"model": {"w": t()}, "scale": t()}) == {"model.w": ("model", "w"), "scale": ("top", "scale")}
    both = {"model": {"w": t()}, "top": {"w": t()}, "scale": t()}
    assert parts(both)["scale"] == ("top_", "scale")


def test_a_state_that_is_not_a_dict_is_one_part() -> None:
    assert parts([t(), {"a": t()}]) == {"0": ("model", "0"), "1.a": ("model", "1.a")}
    assert parts(t()) == {"tensor": ("model", "tensor")}


def test_parts_of_equal_text_get_different_names() -> None:
    assert parts({1: {"w": t()}, "1": {"w": t()}}) == {"%i1.w": ("%i1", "w"), "1.w": ("1", "w")}
    clash = {"a.b": {"c": {"d": t()}, "c.d": t(), "c%2Ed": t()}}
    assert names(clash)
    assert [part for part, _ in parts(clash).values()] == ["a.b"] * 3


@pytest.mark.parametrize(
    ("part", "stem"),
    [
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
    ],
)
def test_file_stems(part: str, stem: str) -> None:
    assert part_file_stem(part) == stem


def test_long_stems_are_truncated_and_remain_distinct() -> None:
    long = ["ä" * 100, "ä" * 99 + "a", "x" * 101]
    stems = part_file_stems(long)
    assert all(len(stem) <= 100 and set(stem) <= set("%-_") | set(map(chr, range(48, 123))) for stem in stems.values())
    assert len(set(stems.values())) == 3


def test_stems_are_unique_without_case() -> None:
    stems = part_file_stems(["Model", "model", "other"])
    assert stems["other"] == "other"
    assert len({stem.lower() for stem in stems.values()}) == 3


NAMES = ["model.a.weight", "model.b.weight", "model.b.bias", "optimizer.x[0]"]


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ("model.*", NAMES[:3]),
        (["*.bias", "*.a.*"], [NAMES[0], NAMES[2]]),
        ("optimizer.x[0]", NAMES[3:]),
        ("model.?.bias", NAMES[2:3]),
        ("model.[!a].weight", NAMES[1:2]),
        ([], []),
    ],
)
def test_selection(patterns: object, chosen: list[str]) -> None:
    assert select(NAMES, patterns) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.a.wieght", "'model.a.weight'"),
        ("model", "'model.*'"),
        ("MODEL.*", "model."),
        ("zzz", "its names look like"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"no tensor matches '{pattern}'".replace("*", r"\*")) as caught:
        select(NAMES, ["model.a.weight", pattern])
    assert hint in str(caught.value.remedy)


def test_selection_from_a_checkpoint_without_tensors() -> None:
    with pytest.raises(UsageError, match="the checkpoint has no tensors"):
        select([], "*")


def test_many_exact_names_are_looked_up() -> None:
    candidates = [f"layers.{i}.weight" for i in range(20_000)] + ["odd[1]"]
    begin = time.perf_counter()
    assert select(candidates, candidates) == candidates
    assert time.perf_counter() - begin < 2
    # A name that is also a glob matches as both.
    assert select(["odd[1]", "odd1", "odd2"], "odd[1]") == ["odd[1]", "odd1"]
