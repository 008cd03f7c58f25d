"""What users see of the library's own objects: reprs, pickles, and errors for wrong keywords."""

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint.options import drawn, in_notebook


@pytest.fixture
def saved(tmp_path: Path) -> tensorkeep.SaveReport:
    """A checkpoint of one tensor and a step."""
    return tensorkeep.save({"w": torch.arange(6).reshape(3, 2), "step": 7}, tmp_path / "a")


def test_reprs(saved: tensorkeep.SaveReport, tmp_path: Path) -> None:
    assert repr(saved).startswith(f"<SaveReport {saved.path!r}: 1 tensor, 48 B stored in ")
    rule = tensorkeep.EverySteps(10) | tensorkeep.EveryTime("15min")
    with tensorkeep.CheckpointManager(tmp_path, keep_last=2, save_when=rule) as manager:
        assert repr(manager) == (
            f"CheckpointManager({str(tmp_path)!r}, keep=KeepAny(rules=(KeepLast(count=2),)), "
            "save_when=AnyOf(rules=(EverySteps(interval=10), EveryTime('15min'))))"
        )
    with tensorkeep.OnSignal() as on_signal:
        assert repr(on_signal) == "OnSignal(SIGTERM, SIGUSR1)"
    assert repr(tensorkeep.RandomState()) == "RandomState()"


def test_steps_checkpoints_and_lazy_tensors_are_pickled_by_their_paths(
    saved: tensorkeep.SaveReport, tmp_path: Path
) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.ones(1)}, metrics={"loss": 2.0}).wait()
        step = manager.latest()
    assert pickle.loads(pickle.dumps(step)) == step
    with tensorkeep.open(saved.path) as checkpoint:
        content = pickle.dumps((checkpoint, checkpoint["w"]))
    other, lazy = pickle.loads(content)
    with other:
        assert torch.equal(other["w"][1:], lazy[1:])
        assert other.plain_values == {"step": 7}
    with pytest.raises(tensorkeep.UsageError, match="closed"):
        pickle.dumps(checkpoint)
    tensorkeep.save({"w": torch.ones(1)}, saved.path, overwrite=True)
    with pytest.raises(tensorkeep.UsageError, match="was replaced since it was pickled"):
        pickle.loads(content)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda path: tensorkeep.load(path, map_location="cpu"),
            r"load\(\) got an .* 'map_location': give device=",
        ),
        (lambda path: tensorkeep.load(path, devise="cpu"), "did you mean 'device'"),
        (lambda path: tensorkeep.open(path, device="cpu"), "give it to load"),
        (lambda path: tensorkeep.CheckpointManager(path, max_to_keep=3), "did you mean 'keep_last'"),
        (lambda path: tensorkeep.CheckpointManager(path, keeplast=3), "did you mean 'keep_last'"),
        (lambda path: tensorkeep.CheckpointManager(path).save(1, {}, metric={}), "give metrics="),
        (lambda path: tensorkeep.CheckpointManager(path).restore(state={}), "give into="),
    ],
)
def test_wrong_keywords(call: Callable[[str], Any], message: str, saved: tensorkeep.SaveReport) -> None:
    with pytest.raises(TypeError, match=message):
        call(saved.path)


def test_a_misspelt_keyword_of_save(tmp_path: Path) -> None:
    for wrong, right in (("compresion", "compression"), ("overwite", "overwrite"), ("shard_byte", "shard_bytes")):
        with pytest.raises(tensorkeep.UsageError, match=f"did you mean '{right}'"):
            tensorkeep.save({"w": torch.ones(1)}, tmp_path / "b", **{wrong: 1})


def test_a_notebook_has_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    with drawn(True, "saving") as callback:
        assert callback is None
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook()
    with drawn(True, "saving") as callback:
        assert callback is not None
        callback(1, 2)
