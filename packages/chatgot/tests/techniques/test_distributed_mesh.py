"""Meshes of more than one dimension, in runs of four processes."""

from pathlib import Path
from typing import ClassVar

import pytest

from chatgot.step.train_step import take_step
from chatgot.techniques.fsdp import Fsdp, Hsdp
from chatgot.testing import TINY, opened, train_run, trained
from techniques.parallel_suite import ProcessRun, ShardedSuite
from techniques.several_processes import EXACT, ProcessPool, check_trained_as, task

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("processes")]

TENSOR = {"techniques.tensor-parallel": "on"}


def test_two_dimensions_make_the_step_of_one_process(four_processes: ProcessPool, tmp_path: Path, data: Path) -> None:
    with opened(EXACT, tmp_path / "alone", data) as run:
        alone = take_step(run)
    meshes = {"hsdp": {"techniques.hsdp": "on"}, "fsdp": {"techniques.fsdp": "on", **TENSOR}}
    tasks = {name: task("step", EXACT.changed(changes), tmp_path / name, data) for name, changes in meshes.items()}
    for process in four_processes.run(tasks):
        for name in meshes:
            figures = process[name]["proofs"][name]
            assert figures["local_bytes"] < 0.51 * figures["whole_bytes"]
            assert process[name]["record"] == pytest.approx(alone, rel=1e-6), name


@pytest.mark.exhaustive
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
    check_trained_as(run, trained(base, data))


@pytest.mark.exhaustive
class TestHsdp(ShardedSuite):
    technique = Hsdp
    processes = 4

    def test_each_process_has_half_of_the_bytes(self, together: ProcessRun) -> None:
        for process in together.results:
            figures = process["verified"]["proofs"]["hsdp"]
            assert (figures["replicate_size"], figures["shard_size"]) == (2, 2)
            assert figures["local_bytes"] == pytest.approx(figures["whole_bytes"] / 2, rel=0.01)


@pytest.mark.exhaustive
class TestFsdpBesideTensorParallel(ShardedSuite):
    technique = Fsdp
    processes = 4
    config = TINY.changed(TENSOR)
    others: ClassVar = TENSOR

    def test_each_process_has_a_quarter_of_the_sharded_bytes(self, together: ProcessRun) -> None:
        for process in together.results:
            figures = process["verified"]["proofs"]["fsdp"]
            assert (figures["shard_size"], figures["tensor_size"]) == (2, 2)
            assert figures["whole_bytes"] / 4 < figures["local_bytes"] < figures["whole_bytes"] / 3
            assert process["verified"]["proofs"]["tensor-parallel"]["heads"] == 1
