"""Training on a CPU, idle and beside a busy process, by how long OpenMP threads spin: ``cpu_spin.py --out FILE``.

torch's CPU wheels compute with libgomp, whose threads spin between two parallel regions, and sleep after
``GOMP_SPINCOUNT`` rounds. Spinning avoids the cost of waking up, but beside a busy process it uses up the time slice
that the thread needs for its next region. `chatgot.step.cpu` changes that while a run trains; the other arms
have one count.

Each arm trains some steps of ``shakespeare-char-cpu`` in a process of its own, on an idle machine and beside processes
that compute all the time, with the arms interleaved. Printed are the median tokens per second, and the ratio to the
better one of libgomp's default and ``OMP_WAIT_POLICY=PASSIVE`` in the same state. The machine must otherwise be idle.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from chatgot.data.prepare import prepare
from figures import busy_processes, note, parser_of, write_samples
from recipes import train_run

_DEFAULT_OF_LIBGOMP = "300000"
"""The spin count of libgomp without OMP_WAIT_POLICY; it is given, because `tensorkeep train` controls it otherwise."""
_COUNTS = ("1000", "10000")
ARMS: dict[str, dict[str, str]] = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{count: {"GOMP_SPINCOUNT": count} for count in _COUNTS},
    "default": {"GOMP_SPINCOUNT": _DEFAULT_OF_LIBGOMP},
    "tensorkeep": {},
}
BASELINES = ("passive", "default")
STATES = ("idle", "busy")

Rates = dict[str, dict[str, list[float]]]
"""Tokens per second of each round, by state and arm."""


def main() -> int:
    options = _options()
    rates: Rates = {state: {arm: [] for arm in ARMS} for state in STATES}
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-") as folder:
        data = Path(folder) / "data"
        prepare(options.data, data, tokenizer="char")
        for number in range(options.rounds):
            # Interleaved, so that a drift of the machine affects all arms alike.
            for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
                for state in STATES:
                    with busy_processes(options.busy if state == "busy" else 0):
                        rate = _trained(arm, data, Path(folder), options.steps)
                    rates[state][arm].append(rate)
                    note(f"round {number + 1}, {state}, {arm}: {rate:,.0f} tokens/s")
    _print(rates)
    command = f"cpu_spin.py --rounds {options.rounds} --steps {options.steps} --busy {options.busy}"
    write_samples(options.out, command, arms=ARMS, unit="tokens per second", rates=rates, ratios=ratios(rates))
    return 0


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--data", default="src", help="a text to train on; by default the sources of this project")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--busy", type=int, default=1, help="how many processes compute in the state 'busy'")
    return parser.parse_args()


def _trained(arm: str, data: Path, folder: Path, steps: int) -> float:
    """Return the tokens per second of training, without the first step."""
    words = ["shakespeare-char-cpu", "--loop.steps", str(steps), "--checkpoint.every", "0"]
    words += ["--eval.every", "0", "--eval.batches", "1"]
    ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | ARMS[arm]
    return float(train_run(words, data, folder, environment)["tokens_per_second"])


def ratios(rates: Rates) -> dict[str, dict[str, float]]:
    """Return the median rate of each arm, relative to the better baseline of the state."""
    medians = {state: {arm: statistics.median(each) for arm, each in arms.items()} for state, arms in rates.items()}
    return {
        state: {arm: median / max(arms[name] for name in BASELINES) for arm, median in arms.items()}
        for state, arms in medians.items()
    }


def _print(rates: Rates) -> None:
    found = ratios(rates)
    print(f"{'spin count':12}" + "".join(f"{state + ' tokens/s':>20}{'ratio':>7}" for state in STATES))
    for arm in ARMS:
        cells = (f"{statistics.median(rates[state][arm]):>20,.0f}{found[state][arm]:>7.2f}" for state in STATES)
        print(f"{arm:12}" + "".join(cells))


if __name__ == "__main__":
    sys.exit(main())
