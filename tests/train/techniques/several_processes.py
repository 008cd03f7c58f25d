"""Runs that several processes train together: started here, and by this file as a script each of them.

What a process does is a list of tasks, given as JSON; what came of each is a line of JSON on its standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import tensorkeep.train.run.setup
from tensorkeep.errors import TensorkeepError
from tensorkeep.testing.technique_suite import TINY, train_run
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.generate import generate
from tensorkeep.train.loop import take_step, train
from tensorkeep.train.model.gpt import GPT, token_loss
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques import mixed_precision

Task = dict[str, Any]

EXACT = TINY.changed({"model.dropout": 0.0})
"""Without dropout, several processes compute what one does."""

_SECONDS = 120


def task(do: str, config: Config, folder: Path, data: Path, **others: Any) -> Task:
    """Return a task; see `_DOES`."""
    return {"do": do, "config": config.as_dict(), "folder": str(folder), "data": str(data), **others}


def trained_by(size: int, tasks: Sequence[Task], place: Path, *, cuda: bool = False) -> list[list[Any]]:
    """Let several processes do tasks together; return what came of each, by process.

    Raises
    ------
    AssertionError
        If one of them failed.
    """
    ended = started(size, tasks, place, cuda=cuda)
    assert all(each.returncode == 0 for each in ended), "\n".join(each.stderr[-4000:] for each in ended)
    return [[json.loads(line) for line in each.stdout.splitlines()] for each in ended]


def done_by(size: int, tasks: Mapping[str, Task], place: Path) -> list[dict[str, Any]]:
    """Let several processes do tasks that have names; return what came of each, by process and name."""
    return [dict(zip(tasks, said, strict=True)) for said in trained_by(size, [*tasks.values()], place)]


def started(
    size: int, tasks: Sequence[Task], place: Path, *, cuda: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """Let several processes do tasks together; return how each ended."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "tasks.json").write_text(json.dumps(list(tasks)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), str(place), "cuda" if cuda else "cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        said = [each.communicate(timeout=_SECONDS) for each in processes]
    finally:
        for each in processes:
            each.kill()
    return [
        subprocess.CompletedProcess(each.args, each.returncode, *texts)
        for each, texts in zip(processes, said, strict=True)
    ]


@contextmanager
def group_of_one() -> Iterator[None]:
    """Let this process be a group of its own, as torchrun would start it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _train(given: Task) -> None:
    config = Config.from_dict(given["config"])
    resume, stop_after = given.get("resume", False), given.get("stop_after")
    train_run(config, Path(given["folder"]), Path(given["data"]), resume=resume, stop_after=stop_after)


def _step(given: Task) -> Any:
    """Make one watched step of a run that somebody may have tampered with; return the proof, or the refusal."""
    config = Config.from_dict(given["config"])
    try:
        with open_run(config, RunFolder(given["folder"]), Dataset.open(given["data"])) as run:
            if "tamper" in given:
                TAMPER[given["tamper"]](run)
            with run.techniques.verified(run):
                record = take_step(run)
            return {
                "record": record,
                "tokens": run.progress.tokens,
                "proofs": {name: proof.figures for name, proof in run.techniques.proofs.items()},
            }
    except TensorkeepError as error:
        return {"kind": error.kind, "message": error.message}


def generated(given: Task) -> list[int]:
    """Make a step, and return the tokens that the model says go on best with some others."""
    with open_run(Config.from_dict(given["config"]), RunFolder(given["folder"]), Dataset.open(given["data"])) as run:
        take_step(run)
        found: list[int] = generate(run.model, [1, 2, 3], max_new_tokens=8, temperature=0.0).tolist()
        return found


def _stop_one(given: Task) -> Any:
    """Train until the last process, alone, is asked to stop, or is killed; return after which step the run ended."""
    config = Config.from_dict(given["config"])
    with open_run(config, RunFolder(given["folder"]), Dataset.open(given["data"])) as run:

        def stop() -> bool:
            mine = run.progress.step == given["after"] and not run.world.is_main
            if mine and given["killed"]:
                os._exit(9)
            return mine

        summary = train(run, _Nobody(), stop=stop)
        return {"step": summary.step, "reason": summary.reason, "loss": summary.loss}


class _Nobody:
    def on_event(self, step: int, kind: str, values: Mapping[str, Any]) -> None: ...


def _leave_no_sync_on(run: Run) -> None:
    run.techniques.techniques[0].parallel.require_backward_grad_sync = False  # type: ignore[attr-defined]


def _train_an_undivided_copy(run: Run) -> None:
    copy = GPT(run.config.model, generator=torch.Generator().manual_seed(0))
    run.model, run.operations.loss = copy, copy.loss


def _update_tensors_of_before(run: Run) -> None:
    for group in run.optimizers["adamw"].param_groups:
        group["params"] = [torch.nn.Parameter(torch.zeros(each.shape)) for each in group["params"]]


def _change_a_gradient(run: Run) -> None:
    backward = run.operations.backward

    def changed(loss: torch.Tensor) -> None:
        backward(loss)
        run.model.norm.weight.grad.add_(run.world.rank)

    run.operations.backward = changed


def _compute_all_at_once(run: Run) -> None:
    stages = run.techniques.techniques[0].stages  # type: ignore[attr-defined]

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(stages.leave(stages.compute(stages.model.embed(inputs), 0)), targets)

    run.model.loss = loss  # type: ignore[method-assign]


def _hold_all_weights(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


TAMPER: dict[str, Callable[[Run], None]] = {
    "no_sync": _leave_no_sync_on,
    "gradient": _change_a_gradient,
    "copy": _train_an_undivided_copy,
    "optimizer": _update_tensors_of_before,
    "at once": _compute_all_at_once,
    "all weights": _hold_all_weights,
}

_DOES: dict[str, Callable[[Task], Any]] = {"train": _train, "step": _step, "generate": generated, "stop one": _stop_one}


def _main(rank: int, size: int, place: Path, device: str) -> None:
    torch.set_num_threads(1)
    # Measuring takes longer than all tasks.
    for module in (tensorkeep.train.run.setup, mixed_precision):
        module.measured_peak = lambda *arguments: 1e9
    group = {"init_method": f"file://{place / 'meeting'}", "rank": rank, "world_size": size}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60), **group)
    for each in json.loads((place / "tasks.json").read_text()):
        print(json.dumps(_DOES[each["do"]](each)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
