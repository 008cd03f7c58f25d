"""The conformance suite of formats, for ``dcp``."""

from __future__ import annotations

from tensorkeep.formats import dcp
from tensorkeep.testing.format_suite import FormatSuite


class TestDcp(FormatSuite):
    format = dcp.FORMAT
