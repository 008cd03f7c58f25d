"""Many ranks save to an object store together: objects of each rank, one manifest, nothing of a save that failed."""

import re
import secrets
from typing import Any

import pytest
import torch

import tensorkeep
from checkpoint.ranks import cases, store_cases
from ranks import Outcome, outcomes, run_ranks
from store_servers import SECRET, Fault, Proxy, environment_of, make_bucket
from tensorkeep.io.objects import stores
from tensorkeep.paths import StorePath

pytest.importorskip("obstore")


@pytest.fixture
def bucket(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; the requests of this process do not go through the proxy."""
    server.start_again(None)
    name = f"ranks-{secrets.token_hex(4)}"
    make_bucket(server.target, name)
    for key, value in environment_of(server.target).items():
        monkeypatch.setenv(key, value)
    return f"s3://{name}"


def called(server: Proxy, name: str, *arguments: Any, seconds: float = 20) -> list[Outcome]:
    """Call a function of `cases` on two ranks, whose requests go through the proxy."""
    return outcomes(2, store_cases.in_store, environment_of(server.url, seconds=seconds), name, *arguments)


def values(server: Proxy, name: str, *arguments: Any, count: int = 2) -> list[Any]:
    return run_ranks(count, store_cases.in_store, environment_of(server.url), name, *arguments)


def names(url: str) -> list[str]:
    path = StorePath(url)
    return sorted(found.key.removeprefix(f"{path.key}/") for found in stores.objects(path))


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_what_ranks_save_is_one_checkpoint(server: Proxy, bucket: str, compression: str) -> None:
    url = f"{bucket}/run/c"
    reports = values(server, "save", url, "rows", {"compression": compression})
    assert cases.equal(tensorkeep.load(url), cases.full_state())
    assert tensorkeep.verify(url)
    assert len(tensorkeep.info(url).details["ranks"]) == 2
    assert values(server, "load", url, "columns") == [True] * 2
    manifest, *others = names(url)
    assert manifest == "manifest.json"
    ids = {re.search(r"-([0-9a-f]{16})\.", name)[1] for name in others}  # type: ignore[index]
    assert len(ids) == 1
    suffix = "safetensors" if compression == "none" else "tensorkeep"
    save = ids.pop()
    kinds = {re.sub(f"-{save}", "", name) for name in others}
    assert {"rank-00000.json", "rank-00001.json", f"model-rank-00001.{suffix}"} <= kinds
    sizes = sum(found.size for found in stores.objects(StorePath(url)) if not found.key.endswith("manifest.json"))
    assert [report["stored_bytes"] for report in reports] == [sizes, sizes]


def test_in_the_background(server: Proxy, bucket: str) -> None:
    values(server, "save_async", f"{bucket}/c", "rows", {})
    assert cases.equal(tensorkeep.load(f"{bucket}/c"), cases.full_state())


def test_a_checkpoint_is_replaced_as_a_whole_or_not_at_all(server: Proxy, bucket: str) -> None:
    url = f"{bucket}/c"
    tensorkeep.save({"old": torch.ones(3)}, url)
    before = names(url)
    for found in called(server, "save", url, "rows", {}):
        assert found.error in ("DestinationExistsError", "RanksDisagreeError")
        assert "exists already" in found.message
    assert names(url) == before
    values(server, "save", url, "rows", {"overwrite": True})
    assert cases.equal(tensorkeep.load(url), cases.full_state())
    assert not set(before) & set(names(url)) - {"manifest.json"}


@pytest.mark.parametrize(("where", "how"), [("write", "fails"), ("finish", "fails"), ("finish", "dies")])
def test_if_one_rank_fails_all_raise_and_what_was_there_is_whole(
    server: Proxy, bucket: str, where: str, how: str
) -> None:
    url = f"{bucket}/c"
    tensorkeep.save({"old": torch.ones(3)}, url)
    before = names(url)
    found = called(server, "failing", url, where, how)
    assert found[0].error == "RanksDisagreeError"
    assert tensorkeep.load(url)["old"].tolist() == [1, 1, 1]
    assert names(url) == before


class FaultOfManifest(Fault):
    """A fault of the writes of a manifest: of the first one, or of all."""

    def __init__(self, action: str, *, first_only: bool) -> None:
        super().__init__(action, lambda number: True)
        self._left = 1 if first_only else 1_000_000

    def strikes(self, number: int, request: str) -> bool:
        hit = request.startswith("PUT ") and "manifest.json" in request and self._left > 0
        self._left -= hit
        return hit


@pytest.mark.parametrize("action", ["lost", "503"])
def test_the_request_for_the_manifest_may_fail_once(server: Proxy, bucket: str, action: str) -> None:
    server.start_again(FaultOfManifest(action, first_only=True))
    values(server, "save", f"{bucket}/c", "rows", {})
    assert cases.equal(tensorkeep.load(f"{bucket}/c"), cases.full_state())


def test_without_a_manifest_all_ranks_raise_in_time(server: Proxy, bucket: str) -> None:
    server.start_again(FaultOfManifest("503", first_only=False))
    found = called(server, "save", f"{bucket}/c", "rows", {}, seconds=1)
    assert found[0].error == "StoreError"
    assert found[1].error == "RanksDisagreeError"
    for each in found:
        assert "cannot make the checkpoint visible" in each.message
        assert SECRET not in each.message
    with pytest.raises(tensorkeep.NotFoundError):
        tensorkeep.load(f"{bucket}/c/manifest.json")


@pytest.mark.parametrize("incremental", [False, True])
def test_a_manager_keeps_and_restores_steps_of_all_ranks(server: Proxy, bucket: str, incremental: bool) -> None:
    found = values(server, "manage", f"{bucket}/run", incremental)
    assert found[0][1:] == found[1][1:]
    numbers, loss, new_bytes, _ = found[0]
    assert numbers == [2, 3]
    assert loss == pytest.approx(1 / 3)
    if incremental:
        assert new_bytes[1] < new_bytes[0] / 10
    assert tensorkeep.load(f"{bucket}/run@3")["model"]["even"].unique().tolist() == [3.0]
