"""Saves and loads by several ranks, on disk and in object stores: every layout, managers, and failures of one rank."""

import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from checkpoint.ranks import cases, store_cases
from faults.injection import flip_bit
from ranks import outcomes, run_ranks
from store_servers import SECRET, FaultAt, Proxy, environment_of, make_bucket
from tensorkeep.paths import StorePath
from tensorkeep.storage import store_requests
from tiers import exhaustive

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

COUNTS = {"rows": 2, "columns": 2, "replicated": 2, "replicas of shards": 4, "rows and columns": 4, "strided": 4}


class Place:
    """A folder or, with a server, a bucket, where ranks save; their requests go through a proxy."""

    def __init__(self, root: str, server: Proxy | None = None) -> None:
        self.root, self.url, self.server = root, f"{root}/c", server

    def call(self, name: str) -> tuple[Any, ...]:
        """Return how ranks call a function of `cases`."""
        if self.server is None:
            return (getattr(cases, name),)
        return store_cases.in_store, environment_of(self.server.url), name

    def sizes(self) -> dict[str, int]:
        """Return the size of everything here."""
        if self.server is None:
            return {str(each): each.stat().st_size * each.is_file() for each in Path(self.root).rglob("*")}
        return {found.key: found.size for found in store_requests.objects(StorePath(self.root))}

    def fail_manifest(self, action: str, times: int) -> None:
        """Let so many requests fail that would make the checkpoint visible."""
        assert self.server is not None
        self.server.start_again(FaultAt(action, f"PUT {self.url.removeprefix('s3:/')}/manifest.json", times))


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a new folder if a test says ``"disk"``, or else a new bucket, where this process meets no fault."""
    if getattr(request, "param", "store") == "disk":
        return Place(str(tmp_path))
    pytest.importorskip("obstore")
    server: Proxy = request.getfixturevalue("server")
    server.start_again(None)
    name = f"ranks-{secrets.token_hex(4)}"
    make_bucket(server.target, name)
    for key, value in environment_of(server.target).items():
        monkeypatch.setenv(key, value)
    return Place(f"s3://{name}", server)


@pytest.mark.parametrize(
    ("place", "save", "compression"),
    [
        *[("disk", "save", "lossless"), ("store", "save_async", "none")],
        *exhaustive(("disk", "save_async", "none"), ("store", "save", "lossless"), ("store", "save", "none")),
    ],
    indirect=["place"],
)
def test_what_ranks_save_is_one_checkpoint(place: Place, save: str, compression: str) -> None:
    reports = run_ranks(2, *place.call(save), place.url, "rows", {"compression": compression})
    assert cases.equal(tensorkeep.load(place.url), cases.full_state())
    assert tensorkeep.verify(place.url)
    assert len(tensorkeep.info(place.url).details["ranks"]) == 2
    assert {report["tensors"] for report in reports} == {7}
    sizes = {name.rpartition("/")[2]: size for name, size in place.sizes().items()}
    del sizes["manifest.json"]
    assert [report["stored_bytes"] for report in reports] == [sum(sizes.values())] * 2
    # The names of objects end with that of their save.
    saves = {found[1] for name in sizes if (found := re.search(r"-([0-9a-f]{16})\.", name))}
    assert len(saves) == (place.server is not None)
    kinds = {re.sub(r"-[0-9a-f]{16}(?=\.)", "", name) for name in sizes}
    suffix = "safetensors" if compression == "none" else "tensorkeep"
    assert {"rank-00000.json", "rank-00001.json", f"model-rank-00001.{suffix}"} <= kinds
    assert run_ranks(3, *place.call("load"), place.url, "columns") == [True] * 3
    into = cases.zeros_like(cases.full_state())
    tensorkeep.load(place.url, into=into)
    assert cases.equal(into["model"], cases.full_state()["model"])


def test_ranks_load_what_one_process_saved(tmp_path: Path) -> None:
    tensorkeep.save(cases.full_state(), tmp_path / "c", compression="lossless")
    assert run_ranks(3, cases.load, str(tmp_path / "c"), "rows") == [True] * 3


@pytest.mark.parametrize("layout", COUNTS)
@pytest.mark.exhaustive
def test_every_layout_is_loaded_by_every_other(tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "c")
    run_ranks(COUNTS[layout], cases.save, path, layout, {})
    assert cases.equal(tensorkeep.load(path), cases.full_state())
    for other, count in COUNTS.items():
        assert run_ranks(count, cases.load, path, other) == [True] * count


def test_ranks_may_have_other_keys_and_values_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert run_ranks(2, cases.pipeline, str(path)) == [
        [["block0", "shared"], [0, 0], 100, 100],
        [["block1", "shared"], [1, 1], 101, 101],
    ]
    state = tensorkeep.load(path)
    assert sorted(state["model"]) == ["block0", "block1", "shared"]
    assert {rank: value["seed"] for rank, value in state["random"].items()} == {"0": 100, "1": 101}
    *found, last = run_ranks(3, cases.per_rank_of_fewer, str(path))
    assert [*found, last[:2]] == [[[0, 0], 100, ""], [[1, 1], 101, ""], [[9, 9], -1]]
    assert "has no value of rank 2 for 'epoch', 'random', which is left as it is" in last[2]


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


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel", *exhaustive("hsdp", "fsdp and tensor parallel")])
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


@pytest.mark.parametrize(
    ("place", "incremental"),
    [("disk", False), ("store", True), *exhaustive(("disk", True), ("store", False))],
    indirect=["place"],
)
def test_a_manager_keeps_and_restores_steps_of_all_ranks(place: Place, incremental: bool) -> None:
    root = f"{place.root}/run"
    found = run_ranks(2, *place.call("manage"), root, incremental)
    # Rank 0 deletes old steps, and the others may still see them.
    assert found[0][1:] == found[1][1:]
    numbers, loss, new_bytes, _ = found[0]
    assert (numbers, loss) == ([2, 3], pytest.approx(1 / 3))
    assert tensorkeep.load(f"{root}@3")["model"]["even"].unique().tolist() == [3.0]
    if incremental:
        assert new_bytes[1] < new_bytes[0] / 10
    elif place.server is None:  # a damaged step is skipped by all ranks
        flip_bit(Path(root, "step-000003", "model-rank-00001.safetensors"), -100)
        assert run_ranks(2, *place.call("restore_damaged"), root) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("key", r"'plain'.*dtype is int64 on rank 0, and float32 on rank 1"),
        ("shape", r"'plain'.*shape is \[11\] on rank 0, and \[12\] on rank 1"),
        ("value", r"'step' differs between ranks 0 and 1: 12 and 13"),
        ("list", r"'names.1' differs between ranks 0 and 1: 'b' and 'c'"),
        ("path", r"path is '.*/c' on rank 0, and '.*/c-other' on rank 1"),
        ("compression", r"compression is 'none' on rank 0, and 'lossless' on rank 1"),
        ("unsupported", r"rank 1 has failed preparing to save: UnsupportedLeafError: code: a value of type"),
    ],
)
def test_what_differs_between_ranks_is_named_on_all_of_them(tmp_path: Path, what: str, words: str) -> None:
    first, second = outcomes(2, cases.differing, str(tmp_path / "c"), what)
    assert first.error == "RanksDisagreeError"
    assert re.search(words, first.message, re.DOTALL), first.message
    if what == "unsupported":
        assert second.error == "UnsupportedLeafError"
    else:
        assert (second.error, second.message) == (first.error, first.message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "where", "how"),
    [
        *[("disk", "begin", "fails"), ("disk", "finish", "dies"), ("store", "finish", "fails")],
        *exhaustive(("store", "write", "fails"), ("store", "finish", "dies"), ("disk", "begin", "dies")),
        *exhaustive(("disk", "write", "fails"), ("disk", "write", "dies"), ("disk", "finish", "fails")),
        *exhaustive(*(("disk", where, "hangs") for where in ("begin", "write", "finish"))),
    ],
    indirect=["place"],
)
def test_if_one_rank_fails_all_raise_and_what_was_there_is_whole(place: Place, where: str, how: str) -> None:
    tensorkeep.save({"old": torch.ones(3)}, place.url)
    before = place.sizes()
    found = outcomes(2, *place.call("failing"), place.url, where, how, seconds=40 if how == "hangs" else 200)
    assert found[0].error == "RanksDisagreeError"
    expected = {"fails": "rank 1 has failed", "dies": "rank 1 has ended", "hangs": "rank 1 did not answer within 3 s"}
    assert expected[how] in found[0].message
    assert tensorkeep.load(place.url)["old"].tolist() == [1, 1, 1]
    assert place.sizes() == before


def test_a_checkpoint_in_a_store_is_replaced_as_a_whole_or_not_at_all(place: Place) -> None:
    tensorkeep.save({"old": torch.ones(3)}, place.url)
    before = place.sizes()
    for found in outcomes(2, *place.call("save"), place.url, "rows", {}):
        assert found.error in ("DestinationExistsError", "RanksDisagreeError")
        assert "exists already" in found.message
    assert place.sizes() == before
    run_ranks(2, *place.call("save"), place.url, "rows", {"overwrite": True})
    assert cases.equal(tensorkeep.load(place.url), cases.full_state())
    assert before.keys() & place.sizes().keys() == {"c/manifest.json"}


@pytest.mark.parametrize("action", ["lost", "503"])
def test_the_request_for_the_manifest_may_fail_once(place: Place, action: str) -> None:
    place.fail_manifest(action, times=1)
    run_ranks(2, *place.call("save"), place.url, "rows", {})
    assert cases.equal(tensorkeep.load(place.url), cases.full_state())


def test_without_a_manifest_all_ranks_raise_in_time(place: Place) -> None:
    place.fail_manifest("503", times=1_000_000)
    found = outcomes(2, *place.call("save"), place.url, "rows", {})
    assert [each.error for each in found] == ["StoreError", "RanksDisagreeError"]
    for each in found:
        assert "cannot make the checkpoint visible" in each.message
        assert SECRET not in each.message
    with pytest.raises(tensorkeep.NotFoundError):
        tensorkeep.load(f"{place.url}/manifest.json")


def test_a_dtensor_without_a_group_is_an_error_that_names_it(tmp_path: Path) -> None:
    found: list[Any] = outcomes(2, cases.without_group, str(tmp_path / "c"))
    assert [each.error for each in found] == ["UnsupportedLeafError"] * 2
    assert "group=torch.distributed.group.WORLD" in found[0].message
