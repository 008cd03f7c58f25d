"""Saves and loads by several ranks: every layout, other numbers of ranks, managers, and failures of one rank."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from checkpoint.ranks import cases
from ranks import outcomes, run_ranks

COUNTS = {"rows": 2, "columns": 2, "replicated": 2, "replicas of shards": 4, "rows and columns": 4, "strided": 4}


def test_one_process_loads_what_ranks_saved(tmp_path: Path) -> None:
    path = tmp_path / "c"
    reports = run_ranks(2, cases.save, str(path), "rows", {"compression": "lossless"})
    assert cases.equal(tensorkeep.load(path), cases.full_state())
    assert tensorkeep.verify(path)
    assert {report["tensors"] for report in reports} == {7}
    sizes = sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert [report["stored_bytes"] for report in reports] == [sizes, sizes]
    assert run_ranks(3, cases.load, str(path), "columns") == [True] * 3
    into = cases.zeros_like(cases.full_state())
    tensorkeep.load(path, into=into)
    assert cases.equal(into["model"], cases.full_state()["model"])


def test_ranks_load_what_one_process_saved(tmp_path: Path) -> None:
    tensorkeep.save(cases.full_state(), tmp_path / "c", compression="lossless")
    assert run_ranks(3, cases.load, str(tmp_path / "c"), "rows") == [True] * 3


@pytest.mark.parametrize("layout", COUNTS)
@pytest.mark.slow
def test_every_layout_is_loaded_by_every_other(tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "c")
    run_ranks(COUNTS[layout], cases.save, path, layout, {})
    assert cases.equal(tensorkeep.load(path), cases.full_state())
    for other, count in COUNTS.items():
        assert run_ranks(count, cases.load, path, other) == [True] * count


def test_the_state_may_change_as_soon_as_save_async_returns(tmp_path: Path) -> None:
    run_ranks(2, cases.save_async, str(tmp_path / "c"), "rows", {})
    assert cases.equal(tensorkeep.load(tmp_path / "c"), cases.full_state())


def test_ranks_may_have_other_keys_and_values_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert run_ranks(2, cases.pipeline, str(path), 2) == [["block0", "shared"], ["block1", "shared"]]
    state = tensorkeep.load(path)
    assert sorted(state["model"]) == ["block0", "block1", "shared"]
    assert {rank: value["seed"] for rank, value in state["random"].items()} == {"0": 0, "1": 1}
    found = run_ranks(3, cases.per_rank_of_fewer, str(path))
    assert [each[:2] for each in found] == [["0", "0"], ["1", "1"], ["52", "52"]]
    assert "no value of rank 2 for 'random', which is left as it is" in found[2][2]


def test_plain_tensors_that_differ_are_named_in_a_warning(tmp_path: Path) -> None:
    for found in run_ranks(2, cases.differing_tensors, str(tmp_path / "c")):
        assert len(found) == 1
        assert found[0].startswith("'momentum': plain tensors that differ between ranks 0 and 1")
    assert tensorkeep.load(tmp_path / "c")["momentum"].unique().numel() == 1


def test_fsdp_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    losses = run_ranks(2, cases.fsdp, path, "save")
    for count in (3, 1):
        for found in run_ranks(count, cases.fsdp, path, "load"):
            assert found == pytest.approx(losses[0], rel=1e-5)
    saved = tensorkeep.load(path)
    assert saved["model"]["0.weight"].shape == (10, 6)
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == (10, 6)


KINDS = {"fsdp": 2, "tensor parallel": 2, "hsdp": 4, "fsdp and tensor parallel": 4}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if count > 2 else []) for kind, count in KINDS.items()]
)
def test_models_divided_in_every_way_are_one_checkpoint(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c"
    run_ranks(KINDS[kind], cases.save_model, str(path), kind)
    state = tensorkeep.load(path)
    assert cases.equal(dict(state["model"]), cases.reference())
    assert state["model"]["head.weight"] is state["model"]["embedding.weight"]
    assert {name: tensor[0, 0].item() for name, tensor in state["experts"].items()} == {
        f"expert{rank}": rank for rank in range(KINDS[kind])
    }
    for other, count in KINDS.items():
        if count == 2 or KINDS[kind] > 2:
            assert run_ranks(count, cases.load_model, str(path), other) == [True] * count


@pytest.mark.parametrize("incremental", [False, True])
def test_a_manager_keeps_and_restores_steps_of_all_ranks(tmp_path: Path, incremental: bool) -> None:
    found = run_ranks(2, cases.manage, str(tmp_path), incremental)
    # Rank 0 deletes old steps, and the others may still see them.
    assert found[0][1:] == found[1][1:]
    numbers, loss, new_bytes, _ = found[0]
    assert numbers == [2, 3]
    assert loss == pytest.approx(1 / 3)
    if incremental:
        assert new_bytes[1] < new_bytes[0] / 10


def test_a_damaged_step_is_skipped_by_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, cases.manage, str(tmp_path), False)
    data = tmp_path / "step-000003" / "model-rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    assert run_ranks(2, cases.restore_damaged, str(tmp_path)) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("key", r"'plain'.*dtype is int64 on rank 0, and float32 on rank 1"),
        ("shape", r"'plain'.*shape is \[11\] on rank 0, and \[12\] on rank 1"),
        ("value", r"'step' differs between ranks 0 and 1: 12 and 13"),
        ("list", r"'names.1' differs between ranks 0 and 1: 'b' and 'c'"),
        ("path", r"path is '.*/c' on rank 0, and '.*/c-other' on rank 1"),
        ("compression", r"compression is 'none' on rank 0, and 'lossless' on rank 1"),
    ],
)
def test_what_differs_between_ranks_is_named_on_all_of_them(tmp_path: Path, what: str, words: str) -> None:
    found = outcomes(2, cases.differing, str(tmp_path / "c"), what)
    assert [each.error for each in found] == ["RanksDisagreeError"] * 2
    assert all(re.search(words, each.message, re.DOTALL) for each in found), found[0].message
    assert not list(tmp_path.iterdir())


def test_a_value_that_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    found = outcomes(2, cases.differing, str(tmp_path / "c"), "unsupported")
    assert [each.error for each in found] == ["RanksDisagreeError", "UnsupportedLeafError"]
    assert "rank 1 has failed preparing to save: UnsupportedLeafError: code: a value of type" in found[0].message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("begin", "fails"),
        ("write", "fails"),
        ("finish", "fails"),
        ("write", "dies"),
        pytest.param("write", "hangs", marks=pytest.mark.slow),
        *(
            pytest.param(where, how, marks=pytest.mark.slow)
            for where in ("begin", "finish")
            for how in ("dies", "hangs")
        ),
    ],
)
def test_if_one_rank_fails_all_raise_and_what_was_there_is_whole(tmp_path: Path, where: str, how: str) -> None:
    path = tmp_path / "c"
    tensorkeep.save({"old": torch.ones(3)}, path)
    found = outcomes(2, cases.failing, str(path), where, how, seconds=12 if how == "hangs" else 30)
    assert found[0].error == "RanksDisagreeError"
    expected = {"fails": "rank 1 has failed", "dies": "rank 1 has ended", "hangs": "rank 1 did not answer within 3 s"}
    assert expected[how] in found[0].message
    assert tensorkeep.load(path)["old"].tolist() == [1, 1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_a_dtensor_without_a_group_is_an_error_that_names_it(tmp_path: Path) -> None:
    found: list[Any] = outcomes(2, cases.without_group, str(tmp_path / "c"))
    assert [each.error for each in found] == ["UnsupportedLeafError"] * 2
    assert "group=torch.distributed.group.WORLD" in found[0].message
