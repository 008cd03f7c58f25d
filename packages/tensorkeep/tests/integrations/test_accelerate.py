"""`TensorkeepAccelerator` against the real accelerate: a program resumes exactly."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)

from tensorkeep.integrations.accelerate import TensorkeepAccelerator  # noqa: E402


class Progress:
    """A number of steps, registered to be in every checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Program:
    """What a program has that trains with dropout and accumulates two batches."""

    def __init__(self, kind: Any = TensorkeepAccelerator, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=2, **options)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(torch.arange(80.0).reshape(20, 4), batch_size=2)
        self.parts = self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)

    def train(self, batches: Iterator[torch.Tensor], count: int) -> list[Any]:
        """Return the weights after some batches."""
        for batch in itertools.islice(batches, count):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().mean())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.progress.step += 1
        return [parameter.tolist() for parameter in self.model.parameters()]


@pytest.fixture(autouse=True)
def one_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_program_resumes_exactly(tmp_path: Path) -> None:
    batches = list(torch.arange(80.0).reshape(20, 4).split(2))
    first = Program()
    first.train(iter(batches), 3)
    first.model.zero_grad()  # in the middle of an accumulation: gradients are not saved, as in accelerate
    path = first.accelerator.save_state(tmp_path / "state", compression="lossless")
    whole = first.train(iter(batches[3:]), 5)
    resumed = Program()
    resumed.accelerator.load_state(path)
    assert (resumed.progress.step, resumed.accelerator.step) == (3, 3)
    assert resumed.train(iter(batches[3:]), 5) == whole
    assert Path(path, "optimizers.tensorkeep").is_file()  # the suffix of compressed files


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_position_of_a_stateful_loader_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    options = {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}
    first = Program(**options)
    batches = iter(first.loader)
    first.train(batches, 4)
    first.accelerator.save_state(tmp_path / "state")
    resumed = Program(**options)
    resumed.accelerator.load_state(tmp_path / "state")
    left = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in resumed.loader] == left and len(left) == 6


def test_automatic_names_and_their_limit(tmp_path: Path) -> None:
    project = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}
    first = Program(project_config=ProjectConfiguration(**project))
    for count in range(12):
        first.progress.step = count
        first.accelerator.save_state()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_10", "checkpoint_11"]
    resumed = Program(project_config=ProjectConfiguration(**project))
    resumed.accelerator.load_state()
    assert resumed.progress.step == 11
    resumed.accelerator.project_configuration.iteration = 10
    with pytest.raises(tensorkeep.DestinationExistsError, match="checkpoint_10"):
        resumed.accelerator.save_state()


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    program = Program()
    for call, kind, message in (
        (lambda: program.accelerator.save_state(), tensorkeep.UsageError, "needs a path"),
        (lambda: program.accelerator.load_state(), tensorkeep.UsageError, "needs a path"),
        (lambda: program.accelerator.load_state(tmp_path / "none"), tensorkeep.NotFoundError, "none"),
        (lambda: program.accelerator.save_state(tmp_path, False), tensorkeep.UsageError, "safe_serialization"),
    ):
        with pytest.raises(kind, match=message):
            call()
    program.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(tensorkeep.UnsupportedError, match="pre-hooks"):
        program.accelerator.save_state(tmp_path / "state")


def train_sharded(path: Path, steps: range) -> list[Any]:
    from torch import distributed as dist
    from torch.distributed.fsdp import FSDPModule

    with pytest.MonkeyPatch.context() as patches, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own, others = str(dist.get_rank()), str(dist.get_world_size())
        variables = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": others, "LOCAL_WORLD_SIZE": others}
        for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            patches.setenv(name, value)
        AcceleratorState._reset_state(reset_partial_state=True)  # of another test on this rank
        accelerator = TensorkeepAccelerator(cpu=True)
        # accelerate takes FSDP2 on GPUs only, and shards on a CPU as well.
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        torch.manual_seed(steps.start)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no averages
        if path.exists():
            accelerator.load_state(path)
        for step in steps:
            accelerator.backward(model(torch.full((2, 8), float(step))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(path)
        return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]


@pytest.mark.exhaustive
def test_a_sharded_model_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    [whole, _] = run_ranks(2, train_sharded, tmp_path / "whole", range(1, 4))
    run_ranks(2, train_sharded, tmp_path / "run", range(1, 3))
    for rank in run_ranks(3, train_sharded, tmp_path / "run", range(3, 4)):
        for found, expected in zip(rank, whole, strict=True):
            # Sums over three ranks have another order.
            assert found == pytest.approx(expected, abs=1e-5)
    assert len(list((tmp_path / "run").glob("models-rank-*"))) == 3
