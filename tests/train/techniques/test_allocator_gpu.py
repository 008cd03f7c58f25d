"""Settings of the CUDA allocator on a GPU: set before the process starts, and set too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorkeep.train.data.prepare import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

TRAIN = """
import os, sys, torch
torch.ones(1, device="cuda")
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
from pathlib import Path
from tensorkeep.testing.technique_suite import TINY, verified_step, with_techniques
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import take_step
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.folder import RunFolder
config = with_techniques(TINY.changed({"loop.device": "cuda"}), {"allocator": {}})
with open_run(config, RunFolder(Path(sys.argv[2])), Dataset.open(Path(sys.argv[1]))) as run:
    verified_step(run)
    print(run.techniques.proofs["allocator"].seen)
"""


def trained(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    prepare(folder / "text.txt", folder / "data", tokenizer="char")
    command = [sys.executable, "-c", TRAIN, str(folder / "data"), str(folder / "run")]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_segments_are_expandable_with_the_environment(tmp_path: Path) -> None:
    found = trained(tmp_path, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert "segments grow" in found.stdout, found.stderr


def test_environment_that_is_set_too_late_is_an_error(tmp_path: Path) -> None:
    found = trained(tmp_path, {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""})
    assert "expandable_segments=False instead of True" in found.stderr
