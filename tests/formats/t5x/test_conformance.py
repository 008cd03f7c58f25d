"""The conformance suite of formats, for ``t5x``."""

from tensorkeep.formats import t5x
from tensorkeep.testing.format_suite import FormatSuite


class TestT5X(FormatSuite):
    # T5X's default, float32, does not keep the bits of a NaN, which random elements contain.
    format = t5x.FORMAT
    options = {"dtype": "keep"}  # noqa: RUF012
