"""Processes that train runs together, for tests: each does the tasks that it receives, and returns their results."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import chatgot.run.folder
import chatgot.run.setup
from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.generate import generate
from chatgot.loop import Silent, train, validation_loss
from chatgot.memory import live_bytes
from chatgot.model.gpt import GPT, IGNORED, token_loss
from chatgot.run.folder import RunFolder
from chatgot.run.resume import branch_point
from chatgot.run.setup import open_run
from chatgot.run.state import OpenRun
from chatgot.step.train_step import take_step
from chatgot.techniques import mixed_precision
from chatgot.testing import TINY, losses, opened, train_run
from forked import ended, kill, start
from tensorkeep.errors import TensorkeepError

Task = dict[str, Any]
Results = list[dict[str, Any]]
"""The result of each task by its name, for each process."""

EXACT = TINY.changed({"model.dropout": 0.0})
"""Without dropout, several processes compute the same as one."""

FOUR_STEPS = {"loop.steps": 4, "checkpoint.every": 2, "eval.every": 2}
"""Changes of a configuration: fewer steps, which are as many as a kill and a resumption need."""

_TIMEOUT_SECONDS = 150


def task(action: str, config: Config, folder: Path, data: Path, **options: Any) -> Task:
    """Return a task; see `ACTIONS`."""
    return {"action": action, "config": config.as_dict(), "folder": str(folder), "data": str(data), **options}


def check_trained_as(folder: Path, whole: Path) -> None:
    """Check that a run, which was stopped and evaluated more often, has the losses of another one."""
    found, expected = losses(folder), losses(whole)
    steps, expected_steps = ([loss for _, kind, loss in each if kind == "train"] for each in (found, expected))
    assert [*steps, found[-1][2]] == pytest.approx([*expected_steps, expected[-1][2]], rel=1e-6)


class ProcessPool:
    """Processes of one gloo group (with ``cuda``, also nccl), which do tasks together until the pool is closed.

    Their first task takes longest, so tests share a pool.

    Parameters
    ----------
    size : int
    folder : Path
        An empty folder, for the rendezvous and the standard error of the processes.
    cuda : bool
    """

    def __init__(self, size: int, folder: Path, *, cuda: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = [folder / f"output-{rank}" for rank in range(size)]
        pipes = [Pipe() for _ in range(size)]
        self._tasks = [pipe[0] for pipe in pipes]
        device = "cuda" if cuda else "cpu"
        self.processes = [
            start(_main, rank, size, folder, device, theirs, output=self._outputs[rank])
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for each in self._tasks:
            each.close()
        try:
            if error is None:
                for process in self.processes:
                    ended(process, _TIMEOUT_SECONDS)
        finally:
            for process in self.processes:
                kill(process)

    def outputs(self) -> list[str]:
        """Return what the processes wrote to their standard output and error."""
        return [each.read_text() for each in self._outputs]

    def send(self, tasks: Mapping[str, Task]) -> list[list[Any]]:
        """Let all processes do tasks; return the results of each, which are fewer than tasks if a process ended."""
        for each in self._tasks:
            # A process that has ended in an earlier task returns nothing.
            with suppress(BrokenPipeError):
                each.send([*tasks.values()])
        return [_received(each, len(tasks)) for each in self._tasks]

    def run(self, tasks: Mapping[str, Task]) -> Results:
        """Let all processes do tasks; return their results.

        Raises
        ------
        AssertionError
            If a task failed.
        """
        results = self.send(tasks)
        assert all(len(each) == len(tasks) for each in results), "\n".join(each[-4000:] for each in self.outputs())
        return [dict(zip(tasks, each, strict=True)) for each in results]


def _received(connection: Connection, count: int) -> list[Any]:
    found: list[Any] = []
    with suppress(EOFError, ConnectionResetError):
        while len(found) < count and connection.poll(_TIMEOUT_SECONDS):
            found.append(connection.recv())
    return found


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a process group, as torchrun with one process does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compile_by(patches: pytest.MonkeyPatch, backend: Any) -> None:
    """Let torch compile with a backend, whatever a run asks for."""
    real = torch.compile
    patches.setattr(torch, "compile", lambda function, **options: real(function, **options | {"backend": backend}))


def _train(given: Task) -> None:
    resume, stop_after = given.get("resume", False), given.get("stop_after")
    with pytest.MonkeyPatch.context() as patches:
        if "compile_by" in given:
            compile_by(patches, given["compile_by"])
        train_run(_config(given), Path(given["folder"]), Path(given["data"]), resume=resume, stop_after=stop_after)


class Abandoned(Exception):
    """Ends a run as a kill does: without a checkpoint of its last step."""


def _abandon_or_train(given: Task) -> None:
    """Resume the run in a folder, or start it, from a checkpoint of another one if that is given; do not save it."""
    folder, branch, after = RunFolder(given["folder"]), given.get("branch"), given.get("abandoned_after")
    point = None if branch is None else branch_point(branch)
    with open_run(_config(given), folder, Dataset.open(given["data"]), resume=True, branch=point) as run:

        def stop() -> bool:
            if run.progress.step == after:
                raise Abandoned
            return False

        with suppress(Abandoned):
            train(run, Silent(), stop=stop)


def _config(given: Task) -> Config:
    return Config.from_dict(given["config"])


def _step(given: Task) -> Any:
    """Make one verified step of a run, which may be broken on purpose; return the proofs, or the error."""
    try:
        with opened(_config(given), Path(given["folder"]), Path(given["data"])) as run:
            if "break" in given:
                BREAKS[given["break"]](run)
            with run.techniques.verified(run):
                record = take_step(run)
            proofs = {name: proof.figures for name, proof in run.techniques.proofs.items()}
            return {"record": record, "tokens": run.progress.tokens, "proofs": proofs}
    except TensorkeepError as error:
        return {"kind": error.kind, "message": error.message}


class CollectiveCounter(TorchDispatchMode):
    """Counts the calls of each collective of torch, such as ``_reduce_scatter_base_``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _collectives(given: Task) -> dict[str, int]:
    """Return how often each collective was called in the second step of a run."""
    with opened(_config(given), Path(given["folder"]), Path(given["data"])) as run:
        take_step(run)
        with CollectiveCounter() as counter:
            take_step(run)
        return dict(counter.calls)


def _memory(given: Task) -> dict[str, int]:
    """Open a run; return the most bytes that torch allocated for it at any time, and those of its weights and states.

    ``own`` are those of this process, ``full`` those of the model without optimizer states. ``held`` are the bytes of
    all tensors that are new, whichever thread made them.
    """
    folder, data = RunFolder(Path(given["folder"])), Dataset.open(given["data"])
    # It frees the runs of earlier tasks, which are garbage in cycles: if that happened in the profile, at any moment,
    # their bytes would be taken off, because an earlier profile has counted them.
    before = live_bytes()
    resume = given.get("resume", False)
    with profile(profile_memory=True) as profiler, open_run(_config(given), folder, data, resume=resume) as run:
        weights = list(run.model.parameters())
        found = [state for each in run.optimizers.values() for state in each.state.values()]
        states = [each for state in found for each in state.values()]
        sizes = [4 * weight.numel() for weight in weights]
        own = sum(map(_local_bytes, (*weights, *states)))
        held = live_bytes() - before
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    # They are listed thread by thread.
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    peak = max(accumulate(changes))
    return {"peak": peak, "held": held, "own": own, "full": sum(sizes), "largest": max(sizes)}


def _local_bytes(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).untyped_storage().nbytes()


def generated(given: Task) -> list[int]:
    """Make a step, and return the tokens that the model generates after a prompt."""
    with opened(_config(given), Path(given["folder"]), Path(given["data"])) as run:
        take_step(run)
        tokens: list[int] = generate(run.model, [1, 2, 3], max_new_tokens=8, temperature=0.0).tolist()
        return tokens


def evaluated(given: Task) -> dict[str, Any]:
    """Make a step and evaluate.

    Returns the loss, how many parts there are, the rows and targets of this process, and the norms of the gradient.
    """
    config = _config(given).changed({"log.gradient_norms": True, "log.every": 1})
    with opened(config, Path(given["folder"]), Path(given["data"])) as run:
        take_step(run)
        compute, rows, targets = run.operations.evaluate, list[int](), list[int]()

        def counted(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            rows.append(len(inputs))
            targets.append(int((wanted != IGNORED).sum()))
            return compute(inputs, wanted)

        run.operations.evaluate = counted
        loss, parts = validation_loss(run), run.replicas
        found = {"loss": loss, "parts": parts, "rows": sum(rows), "targets": sum(targets)}
        return found | {"norms": run.gradient_norms}


def _stop_last(given: Task) -> Any:
    """Train until only the last process is asked to stop, or is killed; return the step at which the run ended."""
    with opened(_config(given), Path(given["folder"]), Path(given["data"])) as run:

        def stop() -> bool:
            stops = run.progress.step == given["after"] and not run.world.is_main
            if stops and given["killed"]:
                os._exit(9)
            return stops

        summary = train(run, Silent(), stop=stop)
        return {"step": summary.step, "reason": summary.reason, "loss": summary.loss}


def _leave_no_sync_on(run: OpenRun) -> None:
    run.techniques.techniques[0].parallel.require_backward_grad_sync = False  # type: ignore[attr-defined]


def _train_an_unsharded_copy(run: OpenRun) -> None:
    copy = GPT(run.config.model, generator=torch.Generator().manual_seed(0))
    run.model, run.operations.loss = copy, copy.loss


def _update_other_tensors(run: OpenRun) -> None:
    for group in run.optimizers["adamw"].param_groups:
        group["params"] = [torch.nn.Parameter(torch.zeros(each.shape)) for each in group["params"]]


def _change_a_gradient(run: OpenRun) -> None:
    backward = run.operations.backward

    def changed(loss: torch.Tensor) -> None:
        backward(loss)
        run.model.norm.weight.grad.add_(run.world.rank)

    run.operations.backward = changed


def _compute_without_micro_batches(run: OpenRun) -> None:
    stages = run.techniques.techniques[0].stages  # type: ignore[attr-defined]

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(stages.logits(stages.compute(stages.model.embed(inputs), 0)), targets)

    run.model.loss = loss  # type: ignore[method-assign]


def _hold_all_weights(run: OpenRun) -> None:
    for parameter in run.model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _exchange_each_gradient(run: OpenRun) -> None:
    backward = run.operations.backward

    def exchanged(loss: torch.Tensor) -> None:
        run.model.set_requires_gradient_sync(True)
        backward(loss)

    run.operations.backward = exchanged


BREAKS: dict[str, Callable[[OpenRun], None]] = {"no_sync": _leave_no_sync_on, "gradient": _change_a_gradient}
BREAKS |= {"copy": _train_an_unsharded_copy, "optimizer": _update_other_tensors, "all weights": _hold_all_weights}
BREAKS |= {"at once": _compute_without_micro_batches, "each batch": _exchange_each_gradient}
"""Ways to break a run on purpose."""

ACTIONS: dict[str, Callable[[Task], Any]] = {"train": _train, "abandon or train": _abandon_or_train, "step": _step}
ACTIONS |= {"collectives": _collectives, "memory": _memory, "stop last": _stop_last}
ACTIONS |= {"generate": generated, "evaluate": evaluated}


def _main(rank: int, size: int, folder: Path, device: str, tasks: Connection) -> None:
    torch.set_num_threads(1)
    # The measurement takes longer than all tasks.
    for module in (chatgot.run.setup, mixed_precision):
        module.measured_peak = lambda *arguments: 1e9
    chatgot.run.folder._git = lambda: None
    group = {"init_method": f"file://{folder / 'rendezvous'}", "rank": rank, "world_size": size}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60), **group)
    with suppress(EOFError):
        while True:
            for given in tasks.recv():
                tasks.send(ACTIONS[given["action"]](given))
    dist.destroy_process_group()
