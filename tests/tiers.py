"""The marks of the tiers, for parameters."""

from typing import Any

import pytest


def exhaustive(*cases: Any) -> list["pytest.ParameterSet"]:
    """Return parameters of a test, a tuple where it has several, that `make test` leaves out."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=pytest.mark.exhaustive) for each in values]
