"""An interpreter that ends without waiting for its saves finishes them, and reports those that fail."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in

# With others, as single long tests would come last, when the other workers have ended.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

CODE = """
import threading, torch, tensorkeep
real = threading.Thread.start
def start(thread):
    real(thread)
    if thread.name == "tensorkeep-save":
        raise KeyboardInterrupt
threading.Thread.start = start
try:
    tensorkeep.save_async({"w": torch.zeros(5_000_000)}, "interrupted")
except KeyboardInterrupt:
    print("interrupted")
threading.Thread.start = real
tensorkeep.save_async({"a": torch.ones(3)}, "file/c")
tensorkeep.save_async({"a": torch.arange(5_000_000)}, "c")
"""


def test_it_finishes_and_logs_its_saves_and_ctrl_c_at_the_start_of_a_thread_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"
    assert "NOT SAVED: file/c" in done.stderr
    assert "Not a directory" in done.stderr
    assert names_in(tmp_path) == ["c", "file"]
    assert same(tensorkeep.load(tmp_path / "c"), {"a": torch.arange(5_000_000)})
