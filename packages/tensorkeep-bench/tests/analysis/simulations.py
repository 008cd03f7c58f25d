"""How often the simulations of these tests repeat, and how far chance takes them from what they must show."""

import math

from tiers import exhaustive

SIMULATIONS = [40, *exhaustive(600)]
"""All have fixed seeds: a bound that holds once holds always, so a few repetitions find a large error as well."""


def most(count: int, probability: float, errors: float = 2) -> float:
    """Return how often an event happens at most in simulations, but for some standard errors."""
    return count * probability + errors * math.sqrt(count * probability * (1 - probability))
