"""The example for torchtitan saves and loads what torchtitan's trainer has, with several ranks."""

import runpy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

EXAMPLE = Path(__file__).parents[1] / "examples" / "torchtitan_checkpoints.py"


class Stateful:
    """An object with a state of its own, as the dataloader, the schedulers and the trainer are."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Loader(Stateful):
    """A dataloader whose state is the position of its rank, and no other's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._key, self.position = f"dp_rank_{rank}", b"position 0"

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, self._key: self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state[self._key]


class Optimizers:
    """The optimizers of a model, with one flat state by names of parameters, as torchtitan has."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        self._of = model, optimizer
        self._options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(*self._of, options=self._options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(*self._of, state, options=self._options)


def train(out: Path, steps: range, **options: Any) -> dict[str, Any]:
    """Load, train some steps as torchtitan's trainer does, and return what the run has then."""
    import torch
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    import torchtitan_stub

    torchtitan_stub.install()
    manager_class = runpy.run_path(str(EXAMPLE))["TensorkeepCheckpointManager"]
    torch.manual_seed(steps.start)  # a new run begins with other values than it loads
    rank = dist.get_rank()
    parts = [torch.nn.Sequential(OrderedDict({name: torch.nn.Linear(6, 6)})) for name in ("first", "second")]
    for part in parts:
        fully_shard(part)
        part.set_force_sum_reduction_for_comms(True)
    model = torch.nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = Stateful(step=0, ntokens_seen=0)
    loader = Loader(rank)
    manager = manager_class(
        manager_class.Config(enable=True, interval=2, last_save_model_only=False, **options),
        dataloader=loader,
        model_parts=parts,
        optimizers=Optimizers(model, optimizer),
        lr_schedulers=Stateful(last_epoch=0),
        states={"train_state": trainer},
        base_folder=str(out),
    )
    loaded = manager.load()
    start = {"trainer": dict(trainer.state), "loader": loader.position}
    start["weights"] = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    for step in steps:
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer.state = {"step": step, "ntokens_seen": 12 * step}
        loader.position = b"position %d of rank %d" % (step, rank)
        manager.save(step, last_step=step == steps[-1])
    weights = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    manager.close()
    return {"loaded": loaded, "start": start, "weights": weights}


@pytest.mark.exhaustive
def test_a_run_resumes_from_what_its_ranks_have_saved(tmp_path: Path) -> None:
    first = run_ranks(2, train, tmp_path, range(1, 6), keep_latest_k=2)
    assert not first[0]["loaded"]
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step*")) == ["step-000004", "step-000005"]
    second = run_ranks(2, train, tmp_path, range(6, 7))
    for rank, run in enumerate(second):
        assert run["loaded"]
        assert run["start"]["trainer"] == {"step": 5, "ntokens_seen": 60}
        assert run["start"]["loader"] == b"position 5 of rank %d" % rank
        assert run["start"]["weights"] == first[rank]["weights"]
    assert tensorkeep.load(tmp_path / "checkpoint")["dataloader"]["dp_rank_1"] == b"position 6 of rank 1"


@pytest.mark.exhaustive
def test_more_ranks_resume_without_the_positions_in_the_data(tmp_path: Path) -> None:
    first = run_ranks(2, train, tmp_path, range(1, 3))
    start = run_ranks(3, train, tmp_path, range(3, 4), exclude_from_loading=["dataloader"])[0]["start"]
    assert (start["trainer"]["step"], start["loader"]) == (2, b"position 0")
    assert start["weights"] == first[0]["weights"]


def test_options_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="tensorkeep convert"):
        run_ranks(1, train, tmp_path, range(1, 2), export_dtype="bfloat16")
