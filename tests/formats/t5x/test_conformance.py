"""The format of T5X sits the exam of every format."""

from __future__ import annotations

from tensorkeep.formats import t5x
from tensorkeep.testing.format_suite import FormatSuite


class TestT5X(FormatSuite):
    # T5X's own float32 keeps values, but not every bit of a NaN, which the exam's random bits have.
    format = t5x.FORMAT
    options = {"dtype": "keep"}  # noqa: RUF012
