"""The conformance suite of formats, for ``dcp``."""

from tensorkeep.formats import dcp
from tensorkeep.testing.format_suite import FormatSuite


class TestDcp(FormatSuite):
    format = dcp.FORMAT
