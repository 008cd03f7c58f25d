"""Incremental saves by many ranks, over bases of the same and of another number of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from simulated_ranks import Split, by_dimension, save_by_ranks
from tensorkeep.formats.native.directory import freed_bytes, summarise
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import names_in

ROWS, COLUMNS = 512, 64
GRID = 16 * COLUMNS * 4
"""Sixteen rows."""


LOSSLESS = {"compression": "lossless"}


def state(changed_rows: slice = slice(0, 0)) -> dict[str, Any]:
    torch.manual_seed(1)
    weight = torch.randn(ROWS, COLUMNS)
    weight[changed_rows] += 1e-3 * torch.randn(weight[changed_rows].shape)
    return {"w": weight, "b": torch.arange(100.0), "scalar": torch.tensor(2.0), "step": changed_rows.stop}


def save(path: Path, state: Any, ranks: int, split: Split | None = None, **options: Any) -> list[Any]:
    return save_by_ranks(path, state, ranks, split, grid_bytes=GRID, **options)


@pytest.fixture(
    params=[
        {},
        pytest.param({**LOSSLESS, "delta": True}, marks=pytest.mark.coder),
        pytest.param(LOSSLESS, marks=[pytest.mark.coder, pytest.mark.exhaustive]),
    ],
    ids=str,
)
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    yield {**request.param, "incremental": True}


def test_another_number_of_ranks_writes_only_what_has_changed(tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path / "a", state(), 2, **options)
    later = state(slice(100, 110))
    for ranks in (1, 2, 3):
        path = tmp_path / f"of-{ranks}"
        with case(f"{ranks} ranks"):
            results = save(path, later, ranks, base=tmp_path / "a", **options)
            assert {(result.base, result.base_refused) for result in results} == {(str(tmp_path / "a"), None)}
            # Rows 96 to 111 are one block. Where a border of ranks is inside of a block, that is written as well.
            borders = 0 if ROWS // ranks % 16 == 0 else 2 * ranks
            content = sum(file.stat().st_size for file in path.glob("changes-*")) - 4096 * ranks
            assert content < (1 + borders) * GRID + 8192
            assert tensorkeep.verify(path).ok
            assert difference(tensorkeep.load(path), later) is None
            chain = tensorkeep.info(path).details["history"]["deepest_chain"]
            assert chain == (1 if "delta" in options else 0)


def test_every_step_stands_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = [state(slice(0, 10 * number)) for number in range(4)]
    save(tmp_path / "0", saved[0], 2, **options)
    for number in range(1, 4):
        save(tmp_path / str(number), saved[number], 2, base=tmp_path / str(number - 1), **options)
        for file in (tmp_path / str(number - 1)).iterdir():
            file.unlink()
        assert difference(tensorkeep.load(tmp_path / str(number)), saved[number]) is None
    assert tensorkeep.verify(tmp_path / "3").ok


def test_two_ranks_link_one_file(tmp_path: Path) -> None:
    save(tmp_path / "a", state(), 1, incremental=True)
    save(tmp_path / "b", state(), 4, base=tmp_path / "a")
    assert [file.name for file in (tmp_path / "b").glob("from-*")] == ["from-a-model-rank-00000.tensorkeep"]
    assert (tmp_path / "a" / "model-rank-00000.safetensors").stat().st_nlink == 2
    assert difference(tensorkeep.load(tmp_path / "b"), state()) is None


def test_links_that_no_rank_uses_are_removed(tmp_path: Path) -> None:
    save(tmp_path / "a", state(), 2, incremental=True)
    other = {"w": state()["w"] + 1, "b": state()["b"], "scalar": state()["scalar"], "step": 0}
    save(tmp_path / "b", other, 2, lambda leaf: [*by_dimension(2)(leaf)], base=tmp_path / "a")
    listed = set(tensorkeep.info(tmp_path / "b").details["files"])
    assert {*names_in(tmp_path / "b")} - listed == {"manifest.json", "rank-00000.json", "rank-00001.json"}


def test_columns_of_another_number_of_ranks_are_written_again(tmp_path: Path) -> None:
    save(tmp_path / "a", state(), 2, by_dimension(2, 1), incremental=True)
    save(tmp_path / "b", state(), 4, by_dimension(4, 1), base=tmp_path / "a")
    assert difference(tensorkeep.load(tmp_path / "b"), state()) is None
    results = save(tmp_path / "c", state(), 2, by_dimension(2, 1), base=tmp_path / "a")
    assert sum(result.new_bytes for result in results) < 60_000


def test_a_base_of_another_kind_is_refused_with_the_reason(tmp_path: Path) -> None:
    tensorkeep.save(state(), tmp_path / "one", incremental=True)
    save(tmp_path / "narrow", state(), 2)
    save_by_ranks(tmp_path / "coarse", state(), 2, incremental=True)
    for name, reason in {"one": "one process", "narrow": "incremental=True", "coarse": "in other places"}.items():
        results = save(tmp_path / f"over-{name}", state(), 2, base=tmp_path / name)
        assert all(reason in (result.base_refused or "") and result.base is None for result in results)
        assert difference(tensorkeep.load(tmp_path / f"over-{name}"), state()) is None
    save(tmp_path / "ranks", state(), 2, incremental=True)
    report = tensorkeep.save(state(), tmp_path / "over-ranks", base=tmp_path / "ranks")
    assert "many ranks" in (report.base_refused or "")


def test_retention_frees_what_no_step_has(tmp_path: Path) -> None:
    save(tmp_path / "a", state(), 2, incremental=True)
    save(tmp_path / "b", state(slice(0, 5)), 2, base=tmp_path / "a")
    summary = summarise(tmp_path / "b")
    assert summary.outline.state_bytes == sum(t.nbytes for t in state().values() if isinstance(t, torch.Tensor))
    assert summary.nbytes == sum(file.stat().st_size for file in (tmp_path / "b").iterdir())
    assert freed_bytes([tmp_path / "b"]) < freed_bytes([tmp_path / "a", tmp_path / "b"]) / 5
