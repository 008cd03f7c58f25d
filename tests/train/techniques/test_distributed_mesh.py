"""Meshes of more than one dimension: their sizes, and runs of four processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tensorkeep.errors import UsageError
from tensorkeep.testing.technique_suite import TINY, losses, opened, train_run, trained
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.setup import OpenRun
from tensorkeep.train.techniques.parallel.fsdp import Fsdp, Hsdp
from tensorkeep.train.techniques.parallel.mesh import mesh_sizes
from train.techniques.parallel_suite import ParallelSuite, Together
from train.techniques.several_processes import BREAKS, EXACT, ProcessPool, task

TENSOR = {"techniques.tensor-parallel": "on"}


@pytest.mark.parametrize(
    ("techniques", "size", "machines", "expected"),
    [
        ({"fsdp": {}}, 1, 1, {"shard": 1}),
        ({"fsdp": {}}, 6, 3, {"shard": 6}),
        ({"hsdp": {}}, 8, 1, {"replicate": 2, "shard": 4}),
        ({"hsdp": {}}, 8, 4, {"replicate": 4, "shard": 2}),
        ({"hsdp": {"replicas": 4}}, 8, 2, {"replicate": 4, "shard": 2}),
        ({"tensor-parallel": {}}, 4, 1, {"tensor": 4}),
        ({"fsdp": {}, "tensor-parallel": {}}, 8, 1, {"shard": 4, "tensor": 2}),
        ({"hsdp": {}, "tensor-parallel": {}}, 1, 1, {"replicate": 1, "shard": 1, "tensor": 1}),
        ({"hsdp": {}, "tensor-parallel": {"degree": "4"}}, 16, 1, {"replicate": 2, "shard": 2, "tensor": 4}),
    ],
)
def test_sizes(techniques: Mapping[str, Any], size: int, machines: int, expected: Mapping[str, int]) -> None:
    assert mesh_sizes(techniques, size, machines) == expected


@pytest.mark.parametrize(
    ("techniques", "size", "message"),
    [
        ({"tensor-parallel": {"degree": 2}}, 4, r"4 processes are not a mesh of 2 \(tensor\)"),
        ({"fsdp": {}, "tensor-parallel": {"degree": 3}}, 4, r"not a mesh of 1 \(shard\) x 3 \(tensor\)"),
        ({"hsdp": {"replicas": 8}}, 4, r"not a mesh of 8 \(replicate\) x 1 \(shard\)"),
        ({"hsdp": {}}, 2, "nothing is divided along 'shard'"),
        ({"hsdp": {"replicas": 1}}, 4, "nothing is divided along 'replicate'"),
        ({"fsdp": {}, "tensor-parallel": {"degree": 1}}, 4, "nothing is divided along 'tensor'"),
    ],
)
def test_processes_that_are_not_a_mesh_are_refused(techniques: Mapping[str, Any], size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mesh_sizes(techniques, size)


def test_technique_without_processes_is_named_in_the_remedy() -> None:
    with pytest.raises(UsageError) as caught:
        mesh_sizes({"hsdp": {}}, 2)
    assert caught.value.remedy == "start at least 4 processes, or leave hsdp out"


def test_four_processes_in_two_dimensions_compute_the_same_step_as_one(
    four_processes: ProcessPool, tmp_path: Path, data: Path
) -> None:
    with opened(EXACT, tmp_path / "alone", data) as run:
        alone = take_step(run)
    meshes = {"hsdp": {"techniques.hsdp": "on"}, "fsdp": {"techniques.fsdp": "on", **TENSOR}}
    tasks = {name: task("step", EXACT.changed(changes), tmp_path / name, data) for name, changes in meshes.items()}
    for process in four_processes.run(tasks):
        for name in meshes:
            figures = process[name]["proofs"][name]
            assert figures["local_bytes"] < 0.51 * figures["whole_bytes"]
            assert process[name]["record"] == pytest.approx(alone, rel=1e-6), name


@pytest.mark.slow
def test_run_resumes_with_other_meshes_and_numbers_of_processes(
    two_processes: ProcessPool, four_processes: ProcessPool, tmp_path: Path, data: Path
) -> None:
    base, run = EXACT.changed({"ema.decay": 0.9}), tmp_path / "run"
    meshes = [
        (four_processes, {"techniques.fsdp": "on", **TENSOR}),
        (two_processes, TENSOR),
        (four_processes, {"techniques.hsdp": "on"}),
        (two_processes, {"techniques.pipeline-parallel": "on"}),
        (four_processes, {"techniques.fsdp": "on", **TENSOR}),
    ]
    for pool, changes in meshes:
        pool.run({"step": task("train", base.changed(changes), run, data, resume=True, stop_after=1)})
    train_run(base, run, data, resume=True)
    expected, found = losses(trained(base, data)), losses(run)
    assert [each[2] for each in found if each[1] == "train"] == pytest.approx(
        [each[2] for each in expected if each[1] == "train"], rel=1e-6
    )
    assert found[-1][2] == pytest.approx(expected[-1][2], rel=1e-6)


class FourSuite(ParallelSuite):
    processes = 4
    broken = {  # noqa: RUF012
        "copy": "parameters are not sharded",
        "optimizer": "tensors that are not the model's",
    }

    def break_on_purpose(self, run: OpenRun) -> None:
        """Train a model that is not sharded."""
        BREAKS["copy"](run)


@pytest.mark.slow
class TestHsdp(FourSuite):
    technique = Hsdp

    def test_each_process_has_half_of_the_bytes(self, together: Together) -> None:
        _, results = together
        for process in results:
            figures = process["verified"]["proofs"]["hsdp"]
            assert (figures["replicate_size"], figures["shard_size"]) == (2, 2)
            assert figures["local_bytes"] == pytest.approx(figures["whole_bytes"] / 2, rel=0.01)


@pytest.mark.slow
class TestFsdpBesideTensorParallel(FourSuite):
    technique = Fsdp
    config = TINY.changed(TENSOR)
    others: ClassVar = TENSOR

    def test_each_process_has_a_quarter_of_the_sharded_bytes(self, together: Together) -> None:
        _, results = together
        for process in results:
            figures = process["verified"]["proofs"]["fsdp"]
            assert (figures["shard_size"], figures["tensor_size"]) == (2, 2)
            assert figures["whole_bytes"] / 4 < figures["local_bytes"] < figures["whole_bytes"] / 3
            assert process["verified"]["proofs"]["tensor-parallel"]["heads"] == 1
