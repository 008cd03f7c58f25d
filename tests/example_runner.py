"""Runs an example in a process that is forked from one in which the libraries are imported already."""

import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy


def run(
    example: Path,
    words: list[str],
    output: Path,
    *,
    environment: Mapping[str, str] | None = None,
    own_checkpoints: bool = False,
    waits: bool = False,
) -> None:
    """Run an example as a script; the target of a process.

    Parameters
    ----------
    words : list of str
        Its command line.
    output : Path
        Where stdout and stderr go.
    environment : mapping of str to str, optional
        Variables to set, such as those that torchrun sets for a rank.
    own_checkpoints : bool
        Let Lightning save with its own ``TorchCheckpointIO``.
    waits : bool
        Let its first pause after a save last until it is killed.
    """
    os.environ.update(environment or {})
    numpy.random.seed()  # a fork has the state of its parent, a new process one of its own
    if waits:
        out = Path(words[words.index("--out") + 1])
        time.sleep = lambda seconds: signal.pause() if any(out.glob("step*")) else None
    sys.argv = [str(example), *words]
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if not own_checkpoints:
        runpy.run_path(str(example), run_name="__main__")
    else:
        from lightning.fabric.plugins import TorchCheckpointIO

        found = runpy.run_path(str(example))
        found["main"].__globals__["TensorkeepIO"] = lambda **options: TorchCheckpointIO()
        found["main"]()
    sys.stdout.flush()
