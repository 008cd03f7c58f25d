"""A cell whose run is trained by several ranks, which torchrun starts.

``python -m tensorkeep.bench.training.ranks FOLDER`` is one rank: it trains the job in the folder, and writes its
outcome there.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.run.worker import end_with_parent, failed_outcome
from tensorkeep.bench.training.cell import MEMORY, RESIDENT, TrainingJob
from tensorkeep.errors import RanksDisagreeError, TensorkeepError
from tensorkeep.structs import prepared

_JOB = "job.json"
_LOST = RanksDisagreeError.__name__


def run_on_ranks(job: TrainingJob, ranks: int, folder: Path) -> Outcome:
    """Train a job on so many ranks; return the outcome of rank 0, with the memory of the rank that needs most.

    Raises TensorkeepError if torchrun fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _JOB).write_bytes(msgspec.json.encode(job))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", __name__]
    threads = max(1, torch.get_num_threads() // ranks)
    done = subprocess.run(
        [sys.executable, *command, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    files = [_outcome_file(folder, rank) for rank in range(ranks)]
    if done.returncode or not all(file.exists() for file in files):
        last = (done.stderr.strip().splitlines() or ["without an error message"])[-1]
        raise TensorkeepError(f"torchrun with {ranks} ranks failed: {last}")
    return joined([msgspec.json.decode(file.read_bytes(), type=prepared(Outcome)) for file in files])


def joined(outcomes: list[Outcome]) -> Outcome:
    """Return one outcome of all ranks: the cause if one failed, else that of rank 0 with the largest memory."""
    failed = [each for each in outcomes if each.status != "ok"]
    if failed:
        # Where one rank fails, the others lose their connection to it.
        return min(failed, key=lambda each: _LOST in (each.reason or ""))
    figures = {
        name: max(each.figures[name] for each in outcomes)
        for name in (MEMORY, RESIDENT)
        if all(name in each.figures for each in outcomes)
    }
    return msgspec.structs.replace(outcomes[0], figures={**outcomes[0].figures, **figures})


def _outcome_file(folder: Path, rank: int) -> Path:
    return folder / f"outcome-{rank}.json"


def _main(folder: Path) -> None:
    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=prepared(TrainingJob))
    try:
        outcome = job.run()
    except Exception as error:
        outcome = failed_outcome(error)
        if isinstance(error, RanksDisagreeError):
            outcome.reason = f"{_LOST}: {outcome.reason}"
    _outcome_file(folder, int(os.environ["RANK"])).write_bytes(msgspec.json.encode(outcome))


if __name__ == "__main__":
    end_with_parent()
    _main(Path(sys.argv[1]))
