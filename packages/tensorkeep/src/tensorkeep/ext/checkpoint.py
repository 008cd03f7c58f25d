"""Runs, their steps, and their logs."""

from tensorkeep.checkpoint import options
from tensorkeep.checkpoint.log import RECORD, lines_of
from tensorkeep.runs.address import CHECKPOINTS, backend_of, find_checkpoint, split_address

__all__ = [
    "CHECKPOINTS", "RECORD", "backend_of", "find_checkpoint", "lines_of", "options", "split_address"
]  # fmt: skip
