"""Checkpoints that the user names by their run; which step was chosen is printed on stderr."""

import os

from tensorkeep.cli.errors import error_lines
from tensorkeep.cli.output import Output
from tensorkeep.runs.address import find_checkpoint


def checkpoint_at(path: str, output: Output) -> str:
    """Return the path of the checkpoint that an address names; print which step of a run that is."""
    address = find_checkpoint(path)
    for number, error in address.skipped.items():
        output.note(f"warning: step {number} is skipped: {error_lines(error)[0].removeprefix('error: ')}")
    if address.reason:
        output.note(f"{path}: step {address.step}, {address.reason}")
    return os.fspath(address.path)
