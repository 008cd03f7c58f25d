"""Evaluation on a GPU: without a wait before its end, compiled with CUDA graphs, and profiled."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chatgot.data.batches import Batch
from chatgot.loop import train, validation_loss
from chatgot.run.data import validation_windows
from chatgot.step.train_step import evaluate, take_step
from chatgot.testing import opened, with_techniques
from tiny_training import CONFIG, Witness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

ON_GPU = CONFIG.changed({"loop.device": "cuda", "model.dropout": 0.0})


def without_waits(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches; between the first and the last one, an operation that waits for the GPU is an error."""
    for batch in batches:
        torch.cuda.set_sync_debug_mode("error")
        yield batch
    torch.cuda.set_sync_debug_mode("default")


def test_host_waits_once_at_the_end(tmp_path: Path, data: Path) -> None:
    with opened(ON_GPU, tmp_path / "run", data) as run:
        windows = validation_windows(run.config, run.dataset)
        expected = evaluate(run.model, windows.batches(4), loss=run.operations.evaluate)
        try:
            found = evaluate(run.model, without_waits(windows.batches(4)), loss=run.operations.evaluate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert found == expected


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_evaluation_has_the_plain_loss(tmp_path: Path, data: Path, mode: str) -> None:
    with opened(ON_GPU, tmp_path / "plain", data) as run:
        expected = validation_loss(run)
    with opened(with_techniques(ON_GPU, {"compile": {"mode": mode}}), tmp_path / "run", data) as run:
        assert [validation_loss(run) for _ in range(3)] == pytest.approx([expected] * 3, rel=1e-4)
        take_step(run)


def test_profile_has_the_kernels_of_the_gpu(tmp_path: Path, data: Path) -> None:
    witness = Witness()
    with opened(ON_GPU, tmp_path / "run", data) as run:
        train(run, witness, profile=2)
    (values,) = [values for _, kind, values in witness.seen if kind == "profile"]
    with gzip.open(values["path"]) as file:
        assert "kernel" in {event.get("cat") for event in json.load(file)["traceEvents"]}
