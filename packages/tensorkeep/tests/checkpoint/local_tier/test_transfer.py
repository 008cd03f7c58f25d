"""A checkpoint is copied to a store byte for byte, and what the copy of an earlier one has is not copied again."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tensorkeep
from checkpoint.local_tier.copies import copy
from store_servers import Proxy
from tensorkeep.paths import StorePath
from tensorkeep.runs import transfer
from tensorkeep.runs.address import backend_of
from tensorkeep.runs.transfer import Throttle, Transfer, copy_to_store, find_copy
from tensorkeep.storage import names_in, object_store, store_requests
from tensorkeep.storage.buffers import MINIMUM_BUDGET
from tensorkeep.storage.parallel import Cancellation, Cancelled
from tensorkeep.testing.equality import same

pytestmark = pytest.mark.integration
pytest.importorskip("obstore")

BUCKET = "s3://transfers"


def state(value: float) -> dict[str, Any]:
    frozen = {f"layer{number}": torch.arange(50_000.0) + number for number in range(2)}
    return {"model": {**frozen, "w": torch.full((3000,), value)}, "step": int(value)}


@pytest.fixture
def run(bucket: Proxy, tmp_path: Path) -> StorePath:
    """Return the prefix of a run that nothing else uses."""
    return StorePath(f"{BUCKET}/{tmp_path.name}")


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_copy_has_the_same_bytes(tmp_path: Path, run: StorePath, compression: str) -> None:
    tensorkeep.save(state(5), tmp_path / "c", compression=compression, shard_bytes=250_000)
    copied, sent = copy(tmp_path / "c", run / "c")
    assert same(tensorkeep.load(run / "c"), state(5))
    assert tensorkeep.verify(run / "c")
    assert tensorkeep.diff(run / "c", tmp_path / "c")
    names = {*names_in(run / "c")} - {"manifest.json"}
    assert {f"../c/{name}" for name in names} == {*copied.references.values()}
    assert len({name.rpartition("-")[2].partition(".")[0] for name in names}) == 1, "the id of one save"
    assert sent >= sum((tmp_path / "c" / name).stat().st_size for name in copied.references if "index" not in name)
    if compression == "none":
        objects = {name: store_requests.get(run / "c" / name) for name in names}
        index = next(content for name, content in objects.items() if "index" in name)
        homes = {*json.loads(bytes(index))["weight_map"].values()}
        assert homes == {name for name in objects if name.endswith(".safetensors") and name.startswith("model-")}
        for home in homes:
            assert safetensors.torch.load(bytes(objects[home]))


def steps(root: Path, count: int, **options: Any) -> list[Path]:
    with tensorkeep.CheckpointManager(root, incremental=True, **options) as manager:
        return [Path(manager.save(number, state(number)).wait().path) for number in range(1, count + 1)]


def test_a_copy_is_found_again_shared_and_replaced_only_if_asked(tmp_path: Path, run: StorePath) -> None:
    first, second, third = steps(tmp_path / "run", 3)
    one, all_bytes = copy(first, run / first.name)
    two, changed = copy(second, run / second.name, one)
    three, _ = copy(third, run / third.name, two)
    assert changed < all_bytes / 5
    assert any(name.startswith("../step-000001/") for name in three.references.values()), "through the second copy"
    for number, (step, copied) in enumerate({first: one, second: two, third: three}.items(), 1):
        assert same(tensorkeep.load(run / step.name), state(number))
        assert tensorkeep.verify(run / step.name)
        assert find_copy(step, run / step.name) == copied
    assert find_copy(first, run / second.name) is None
    with pytest.raises(tensorkeep.NotACheckpointError):
        find_copy(first, run / "step-000009")
    # Another checkpoint is replaced only if asked.
    with pytest.raises(tensorkeep.DestinationExistsError):
        copy(second, run / third.name)
    assert same(tensorkeep.load(run / third.name), state(3))
    copy(second, run / third.name, overwrite=True)
    assert same(tensorkeep.load(run / third.name), state(2))


def test_a_step_that_was_replaced_lends_nothing(tmp_path: Path, run: StorePath) -> None:
    first, second = steps(tmp_path / "run", 2)
    third = second.with_name("step-000003")
    one, _ = copy(first, run / first.name)
    two, _ = copy(second, run / second.name, one)
    tensorkeep.save(state(7), second, base=first, overwrite=True)
    tensorkeep.save(state(7), third, base=second)  # has the file of the new second step, by the name of the old one
    copy(third, run / third.name, one, two)
    assert same(tensorkeep.load(run / third.name), state(7))


@pytest.mark.parametrize("deleted", ["objects", "step"])
def test_what_is_gone_or_may_be_deleted_soon_is_sent_again(tmp_path: Path, run: StorePath, deleted: str) -> None:
    first, second = steps(tmp_path / "run", 2)
    one, _ = copy(first, run / first.name)
    if deleted == "objects":
        store_requests.delete([run / first.name / name for name in names_in(run / first.name)])
    else:
        backend_of(run).remove(run / first.name)
    two, _ = copy(second, run / second.name, one)
    assert not any(name.startswith("../step-000001/") for name in two.references.values())
    assert same(tensorkeep.load(run / second.name), state(2))


def test_an_upload_over_a_deleted_step_fails(tmp_path: Path, run: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = steps(tmp_path / "run", 2)
    one, _ = copy(first, run / first.name)
    real = transfer._copy_files

    def copy_files(*arguments: Any) -> Any:
        backend_of(run).remove(run / first.name)
        return real(*arguments)

    monkeypatch.setattr(transfer, "_copy_files", copy_files)
    with pytest.raises(tensorkeep.StoreError, match=r"step-000001/manifest.json was deleted while"):
        copy(second, run / second.name, one)


def test_an_interrupted_copy_and_one_of_a_truncated_file_leave_nothing(tmp_path: Path, run: StorePath) -> None:
    tensorkeep.save(state(5), tmp_path / "c", compression="none", shard_bytes=250_000)
    cancellation = Cancellation()
    transfer = Transfer(Throttle(None), cancellation, lambda done, total: cancellation.cancel())
    with pytest.raises(Cancelled):
        copy_to_store(tmp_path / "c", run / "c", transfer, overwrite=False)
    assert names_in(run / "c") == []
    file = next((tmp_path / "c").glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="was cut short"):
        copy(tmp_path / "c", run / "c")
    assert names_in(run / "c") == []


def test_the_memory_suffices_for_any_file(tmp_path: Path, run: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", MINIMUM_BUDGET + 1024**2)
    large = {"w": torch.zeros(MINIMUM_BUDGET + 2 * 1024**2, dtype=torch.uint8)}
    tensorkeep.save(large, tmp_path / "c")
    copy(tmp_path / "c", run / "c")
    assert tensorkeep.verify(run / "c")


def test_the_throttle_spreads_bytes_over_time() -> None:
    now = 0.0
    waits: list[float] = []

    class Waits(Cancellation):
        def wait(self, seconds: float) -> None:
            nonlocal now
            waits.append(seconds)
            now += seconds

    throttle = Throttle(100, clock=lambda: now)
    for count in (50, 200, 100):
        throttle.wait(count, Waits())
    assert waits == [0.0, 0.5, 2.0]
    now += 60.0  # what was not sent in an idle minute is not sent faster later
    throttle.wait(100, Waits())
    throttle.wait(100, Waits())
    assert math.isclose(sum(waits[3:]), 1.0)
