"""The memory of a rank while a run is opened or resumed: its shards, and one full tensor."""

from pathlib import Path

import pytest

from techniques.several_processes import EXACT, ProcessPool, task

pytestmark = pytest.mark.xdist_group("processes")

LARGE = EXACT.changed({"model.d_model": 128, "model.n_layers": 8, "model.n_heads": 4})
SLACK = 256 * 1024
"""Bytes of batches, positions and messages."""


@pytest.mark.exhaustive
def test_no_rank_has_the_whole_model_when_a_run_is_opened_or_resumed(
    two_processes: ProcessPool, tmp_path: Path, data: Path
) -> None:
    tasks = {"ddp": task("memory", LARGE.changed({"techniques.ddp": "on"}), tmp_path / "ddp", data)}
    sharding = ("fsdp", "tensor-parallel", "pipeline-parallel")
    for name in sharding:
        config = LARGE.changed({f"techniques.{name}": "on"})
        tasks[name] = task("memory", config, tmp_path / name, data)
        tasks[f"{name}, saved"] = task("train", config, tmp_path / name, data, resume=True, stop_after=1)
        tasks[f"{name}, resumed"] = task("memory", config, tmp_path / name, data, resume=True)
    for process in two_processes.run(tasks):
        assert process["ddp"]["peak"] > process["ddp"]["own"] == process["ddp"]["full"]
        for name in sharding:
            opened, resumed = process[name], process[f"{name}, resumed"]
            assert opened["own"] < 0.6 * opened["full"]
            # With the two averages of AdamW.
            assert resumed["own"] == pytest.approx(3 * opened["own"], rel=0.01)
            for found in (opened, resumed):
                assert found["own"] <= found["held"] < found["own"] + SLACK, name
                # The profiler, which counts the memory of one thread, has seen all of it.
                assert found["held"] <= found["peak"] < found["own"] + found["largest"] + SLACK, name
