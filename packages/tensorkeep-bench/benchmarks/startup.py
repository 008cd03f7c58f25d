"""How long a process takes to start: ``tensorkeep --help`` and ``import tensorkeep``, in fresh interpreters."""

import re
import statistics
import subprocess
import sys
import timeit
from dataclasses import dataclass

COMMANDS = {
    "tensorkeep --help": "import sys; from tensorkeep.cli.main import main; sys.exit(main(['--help']))",
    "import tensorkeep": "import tensorkeep",
}
RUNS = 9


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the start of the interpreter to its end, and whether torch was imported on the way.

    Attributes
    ----------
    command : str
    samples : list of float
        Seconds.
    imports_torch : bool
    """

    command: str
    samples: list[float]
    imports_torch: bool

    @property
    def median(self) -> float:
        """The median of the samples, in seconds."""
        return statistics.median(self.samples)


def measure_startup(command: str, runs: int = RUNS) -> Startup:
    """Start one of `COMMANDS` some times, after one start that is not counted.

    Raises
    ------
    subprocess.CalledProcessError
        If it fails.
    """
    line = [sys.executable, "-c", COMMANDS[command]]

    def start() -> None:
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)

    start()
    samples = [timeit.timeit(start, number=1) for _ in range(runs)]
    traced = [line[0], "-X", "importtime", *line[1:]]
    imports = subprocess.run(traced, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True).stderr
    return Startup(command, samples, re.search(r"\|\s+torch$", imports, re.MULTILINE) is not None)
