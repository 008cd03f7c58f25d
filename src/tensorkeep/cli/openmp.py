"""How long OpenMP threads spin before they sleep; it must be set before torch loads its OpenMP library.

torch's CPU wheels bring libgomp, which reads the environment once, when it is loaded. By default its threads spin for
milliseconds between two parallel regions. Beside a busy process this uses up the time slice that a thread needs for
its next region, and training slows down several times. Without any spinning, each region waits until the threads wake
up. A short spin costs little in either case; ``benchmarks/cpu_spin.py`` measures it. Results do not depend on it.
"""

import sys
from collections.abc import MutableMapping, Sequence

SPIN_COUNT = "1000"
"""Rounds of a spin, about 20 microseconds."""

_CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

_COMPUTING = (("train",), ("generate",), ("tune", "training"), ("bench", "training"))
"""The commands that compute with a model. The others compare libraries, which run with their own defaults."""


def limit_spinning(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set the spin count for a command that computes, unless the user chose one or torch is loaded already."""
    computes = any(tuple(words[: len(command)]) == command for command in _COMPUTING)
    chosen = any(name in environment for name in _CHOSEN_BY_USER)
    if computes and not chosen and "torch" not in sys.modules:
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
