"""The format of torch.distributed.checkpoint sits the exam of every format."""

from __future__ import annotations

from tensorkeep.formats import dcp
from tensorkeep.testing.format_suite import FormatSuite


class TestDcp(FormatSuite):
    format = dcp.FORMAT
