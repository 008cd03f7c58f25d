"""The memory of a rank while its run is opened: its own weights, and one full tensor besides."""

from pathlib import Path

from train.techniques.several_processes import EXACT, ProcessPool, task

LARGE = EXACT.changed({"model.d_model": 128, "model.n_layers": 8, "model.n_heads": 4})
SLACK = 256 * 1024
"""Bytes of batches, positions and messages."""


def test_no_rank_builds_the_whole_model(two_processes: ProcessPool, tmp_path: Path, data: Path) -> None:
    names = ("fsdp", "tensor-parallel", "pipeline-parallel", "ddp")
    tasks = {name: task("memory", LARGE.changed({f"techniques.{name}": "on"}), tmp_path / name, data) for name in names}
    for process in two_processes.run(tasks):
        for name in names[:-1]:
            found = process[name]
            assert found["own"] < 0.6 * found["full"]
            assert found["own"] < found["peak"] < found["own"] + found["largest"] + SLACK, name
        assert process["ddp"]["peak"] > process["ddp"]["own"] == process["ddp"]["full"]
