"""Treemaps: areas are the sizes, rectangles fill the whole and do not overlap; modules are split where large."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.formats.base import Entry
from tensorkeep.pages.checkpoint import Group, Rectangle, grouped, module_totals, squarified
from tensorkeep.state.dtypes import BY_NAME

WHOLE = Rectangle(5, 7, 200, 100)


def overlap(a: Rectangle, b: Rectangle) -> float:
    width = min(a.left + a.width, b.left + b.width) - max(a.left, b.left)
    height = min(a.top + a.height, b.top + b.height) - max(a.top, b.top)
    return max(0.0, width) * max(0.0, height)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_areas_are_the_sizes_and_nothing_overlaps(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    found = squarified(sizes, WHOLE)
    for size, place in zip(sizes, found, strict=True):
        assert place.width * place.height == pytest.approx(size / sum(sizes) * 20_000, rel=1e-6, abs=1e-9)
        # The last of very unequal sizes is what rounding leaves of the whole.
        assert WHOLE.left - 1e-3 <= place.left and place.left + place.width <= WHOLE.left + WHOLE.width + 1e-3
        assert WHOLE.top - 1e-3 <= place.top and place.top + place.height <= WHOLE.top + WHOLE.height + 1e-3
    assert all(overlap(a, b) < 1e-3 for a, b in combinations(found, 2))


def test_equal_sizes_are_nearly_square() -> None:
    assert all(0.4 < place.width / place.height < 2.5 for place in squarified([1] * 12, Rectangle(0, 0, 200, 100)))


def entry(name: str, nbytes: int, dtype: str = "float32") -> Entry:
    return Entry(name, name.partition(".")[0], BY_NAME[dtype], (nbytes // 4,), nbytes, nbytes // 2, "raw", "f")


def cells(groups: list[Group]) -> dict[str | None, int]:
    return {each.cell.path: each.cell.nbytes for group in groups for each in group.cells}


def test_large_modules_are_split_and_small_ones_are_not() -> None:
    entries = [entry(f"model.layers.{layer}.{name}", 4000) for layer in range(12) for name in ("q", "k", "v")]
    entries += [entry("model.head.weight", 60_000), entry("model.norm", 8), entry("optimizer.m", 20_000, "bfloat16")]
    groups = grouped(entries, lambda each: each.nbytes)
    assert [group.label for group in groups] == ["model", "optimizer"]
    found = cells(groups)
    assert (found["model.head.weight"], found["model.layers.0.q"], found[None]) == (60_000, 4000, 8)
    assert sum(found.values()) == sum(each.nbytes for each in entries)
    few = grouped([entry(f"model.layers.{layer}.w", 4000) for layer in range(100)], lambda each: each.nbytes)
    assert list(cells(few))[:3] == ["model.layers.0.", "model.layers.1.", "model.layers.2."]


def test_a_module_of_two_dtypes_has_two_cells_and_its_sum_is_that_of_the_chosen_size() -> None:
    entries = [entry("a.w", 400), entry("a.b", 40, "float16"), entry("b.w", 100_000)]
    _, a = grouped(entries, lambda each: each.stored_bytes)
    assert ([each.cell.dtype for each in a.cells], a.nbytes) == (["float32", "float16"], 220)


def test_many_top_level_names_are_not_framed_and_nothing_has_an_empty_map() -> None:
    groups = grouped([entry(f"t{number}", 400) for number in range(2000)], lambda each: each.nbytes)
    assert [(group.label, len(group.cells)) for group in groups] == [("", 1)]
    assert groups[0].cells[0].cell.tensors == 2000
    groups = grouped([entry(f"t{number}.w", 400) for number in range(40)], lambda each: each.nbytes)
    assert len(groups[0].cells) == 40
    assert grouped([], lambda each: each.nbytes) == grouped([entry("empty", 0)], lambda each: each.nbytes) == []


def test_layers_are_summed_together_and_the_smallest_modules_as_well() -> None:
    entries = [entry(f"model.layers.{layer}.w", 400) for layer in range(5)]
    entries += [entry("model.head.w", 100), entry("bias", 40), entry("scale", 8)]
    found = {name: (each.tensors, each.nbytes, each.stored_bytes) for name, each in module_totals(entries, 3).items()}
    assert found == {"model.layers": (5, 2000, 1000), "model.head": (1, 100, 50), "2 more": (2, 48, 24)}
    assert [*found] == ["model.layers", "model.head", "2 more"]
    assert [*module_totals(entries, 4)] == ["model.layers", "model.head", "bias", "scale"]
    assert module_totals([], 3) == {}
