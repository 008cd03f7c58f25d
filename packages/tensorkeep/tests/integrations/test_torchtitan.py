"""`TensorkeepCheckpointManager` with the optimizers, schedulers and data loader of the real torchtitan, on ranks."""

import contextlib
import importlib.util
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from ranks import outcomes, run_ranks

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro torchdata typeguard",
    ),
]


class TrainState:
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def rows() -> Any:
    """Return a dataset of rows, with its position as its state."""
    import torch

    class Rows(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                self.position += 1
                yield torch.full((6,), self.position / 10)

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    return Rows()


def train(out: Path, steps: range, **options: Any) -> dict[str, Any]:
    """Load, train some steps like torchtitan's trainer, and return what the run has at its start and at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    import torch
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    from tensorkeep.integrations.torchtitan import TensorkeepCheckpointManager

    torch.manual_seed(steps.start)  # a new run begins with other values than it loads
    parts = [torch.nn.Sequential(OrderedDict({name: torch.nn.Linear(6, 6)})) for name in ("first", "second")]
    for part in parts:
        fully_shard(part)
        part.set_force_sum_reduction_for_comms(True)
    model = torch.nn.Sequential(*parts)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=parts)
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=9)
    loader = ParallelAwareDataloader(rows(), dist.get_rank(), dist.get_world_size(), batch_size=2)
    state = TrainState()
    with contextlib.closing(
        TensorkeepCheckpointManager.Config(enable=True, interval=2, **options).build(
            dataloader=loader,
            model_parts=parts,
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": state},
            sd_adapter=None,
            base_folder=str(out),
        )
    ) as manager:
        loaded = manager.load(step=-1)
        start = [state.step, *(parameter.full_tensor().tolist() for parameter in model.parameters())]
        batches = iter(loader)
        for step in steps:
            model(next(batches)).square().sum().backward()
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            state.step = step
            manager.save(step, last_step=step == steps[-1])
            manager.maybe_wait_for_staging()
        end = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    return {"loaded": loaded, "start": start, "end": end}


@pytest.mark.exhaustive
def test_a_run_resumes_exactly_from_what_its_ranks_have_saved(tmp_path: Path) -> None:
    whole = run_ranks(2, train, tmp_path / "whole", range(1, 8), last_save_model_only=False)
    first = run_ranks(2, train, tmp_path / "run", range(1, 6), keep_latest_k=2, last_save_model_only=False)
    assert not first[0]["loaded"]
    folder = tmp_path / "run" / "checkpoint"
    assert sorted(path.name for path in folder.glob("step*")) == ["step-000004", "step-000005"]
    resumed = run_ranks(2, train, tmp_path / "run", range(6, 8))
    for rank in range(2):
        assert resumed[rank]["loaded"] and resumed[rank]["start"] == [5, *first[rank]["end"]]
        assert resumed[rank]["end"] == whole[rank]["end"]
    # By default, the last step has the weights for other programs.
    assert list(tensorkeep.load(folder)) == ["model"]


@pytest.mark.exhaustive
def test_more_ranks_resume_without_the_positions_in_the_data(tmp_path: Path) -> None:
    first = run_ranks(2, train, tmp_path, range(1, 3), last_save_model_only=False)
    start = run_ranks(3, train, tmp_path, range(3, 4), exclude_from_loading=["dataloader"])[0]["start"]
    assert start == [2, *first[0]["end"]]


def test_the_last_weights_have_the_dtype_for_export(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path, range(1, 2), export_dtype="bfloat16")
    weights = tensorkeep.load(tmp_path / "checkpoint")["model"]
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_save_in_hf": True}, "checkpoint.last_save_in_hf is not supported\n.*tensorkeep convert"),
        ({"exclude_from_loading": ["loader"]}, "names 'loader', which is not saved\n.*dataloader, lr_scheduler"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    [outcome] = outcomes(1, train, tmp_path, range(1, 2), **options)
    assert re.search(message, outcome.message)
