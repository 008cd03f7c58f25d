"""Steps that are checked for divergence later, as on a GPU: no wait within a step, and the same results."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chatgot.data.dataset import Dataset
from chatgot.loop import train
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.step.state import can_check_later
from chatgot.step.train_step import take_step, train_step
from tensorkeep.errors import DivergedError
from tiny_training import CONFIG, Witness, check_same, last_state, poison, run

FUSED = CONFIG.changed({"optim.implementation": "fused", "loop.gradient_accumulation_steps": 2})
SKIPPING = FUSED.changed({"loop.on_divergence": "skip", "loop.steps": 9, "log.every": 4, "eval.every": 6})


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatgot.run.setup.can_check_later", lambda run: True)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that read a tensor's value, for which a CPU waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "unique"):
            self.found[name] += 1
        return operator(*arguments, **(options or {}))

    def counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of tensors that is counted by its name: those of a CPU's tensors are no operation there."""

        def counted_method(*arguments: Any, **options: Any) -> Any:
            self.found[name] += 1
            return method(*arguments, **options)

        return counted_method


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loop.on_divergence": "skip"},
        {"techniques.mixed-precision.dtype": "bf16", "techniques.fused-cross-entropy": "on"},
        {"optim.name": "muon", "optim.muon_beta2": 0.9},
    ],
    ids=str,
)
def test_no_value_is_read_in_a_step(
    tmp_path: Path, data: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(FUSED.changed(changes), RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        train_step(opened)
        reads = _Reads()
        for name in ("tolist", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, reads.counted(name, getattr(torch.Tensor, name)))
        with reads:
            train_step(opened)
        assert not reads.found
        with reads:
            take_step(opened)
        assert reads.found


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_divergence_is_reported_with_its_own_step(tmp_path: Path, data: Path) -> None:
    witness, config = Witness(), FUSED.changed({"log.every": 5, "checkpoint.every": 2})
    with pytest.raises(DivergedError, match=r"step 7: .* on batches 12 to 13 of the data") as raised:
        run(config, tmp_path / "run", data, listener=witness, arrange=partial(poison, steps=[7, 8]))
    assert "resume from step 6" in str(raised.value.remedy)
    assert witness.of("train") == [5]


def test_updates_are_skipped_on_the_device_as_on_the_cpu_and_a_run_resumes_exactly(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries, broken = [], partial(poison, steps=[2, 3, 7])
    for name, later in (("now", False), ("later", True)):
        monkeypatch.setattr("chatgot.run.setup.can_check_later", lambda run, later=later: later)
        summaries.append(run(SKIPPING, tmp_path / name, data, arrange=broken))
    assert summaries[0].loss == summaries[1].loss
    check_same(tmp_path / "later", tmp_path / "now")
    assert last_state(tmp_path / "later")["progress"]["skipped"] == 3
    run(SKIPPING, tmp_path / "parts", data, arrange=broken, stop_at=5)
    run(SKIPPING, tmp_path / "parts", data, arrange=broken, resume=True)
    check_same(tmp_path / "parts", tmp_path / "now")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_first_step_that_diverges_is_no_error_of_a_technique(tmp_path: Path, data: Path) -> None:
    """Techniques are proved by an update; that of the first step is skipped here."""
    fused = SKIPPING.changed({"techniques.fused-optimizer": "on", "optim.implementation": "default"})
    with pytest.raises(DivergedError, match=r"step 1: the loss is inf"):
        run(fused.changed({"loop.on_divergence": "stop"}), tmp_path / "stop", data, arrange=partial(poison, steps=[1]))
    with open_run(fused, RunFolder(tmp_path / "skip"), Dataset.open(data)) as opened:
        poison(opened, steps=[1])
        train(opened, Witness())
        assert opened.progress.skipped == 1
        assert opened.techniques.proofs["fused-optimizer"].figures["calls"] > 0
        assert opened.checks_later


def test_steps_are_checked_later_on_a_gpu_where_results_stay_the_same(tmp_path: Path, data: Path) -> None:
    cases: list[tuple[dict[str, object], bool]] = [
        ({}, True),
        ({"loop.on_divergence": "skip"}, True),
        ({"loop.on_divergence": "skip", "ema.decay": 0.9}, False),
        ({"loop.on_divergence": "skip", "optim.implementation": "default"}, False),
        ({"optim.implementation": "default"}, True),
        ({"techniques.mixed-precision.dtype": "fp16"}, False),
        ({"techniques.mixed-precision.dtype": "bf16"}, True),
        ({"schedule.name": "range"}, False),
    ]
    for number, (changes, later) in enumerate(cases):
        with open_run(FUSED.changed(changes), RunFolder(tmp_path / str(number)), Dataset.open(data)) as opened:
            assert not can_check_later(opened), changes
            opened.device = torch.device("cuda")
            assert can_check_later(opened) == later, changes
