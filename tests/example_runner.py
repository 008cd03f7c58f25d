"""Runs an example in a process that is forked from one in which the libraries are imported already."""

import os
import runpy
import sys
from pathlib import Path


def run(example: Path, words: list[str], output: Path, *, own_checkpoints: bool = False) -> None:
    """Run an example as a script; the target of a process.

    Parameters
    ----------
    words : list of str
        Its command line.
    output : Path
        Where stdout and stderr go.
    own_checkpoints : bool
        Let Lightning save with its own ``TorchCheckpointIO``.
    """
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
