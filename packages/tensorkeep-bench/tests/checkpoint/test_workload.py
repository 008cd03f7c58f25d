"""The gate of loads, and how tools fail it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broken_tools import LoadsZeros
from tensorkeep.checkpoint.saving import save
from tensorkeep.checkpoint.verify import verify
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case
from tensorkeep_bench.checkpoint.files import files_of
from tensorkeep_bench.checkpoint.measure import INTO_WARM, SAVE, STORED, WARM, measure_tool, outcome_of
from tensorkeep_bench.checkpoint.models import parse
from tensorkeep_bench.checkpoint.states import StatePair, check_equal
from tensorkeep_bench.checkpoint.tools import COMMON_TOOLS, Tool, TorchTool
from tensorkeep_bench.checkpoint.workload import WORKLOAD
from tensorkeep_bench.demo.faults import flip_bit
from tensorkeep_bench.workload import GateError, Outcome


def state() -> dict[str, Any]:
    tied = torch.randn(64, 32)
    return {
        "model": {"wte": tied, "head": tied, "bias": torch.tensor([float("nan"), 0.0]), "t": torch.randn(9, 7).t()},
        "moments": [torch.zeros(3, dtype=torch.bfloat16), torch.ones(5, dtype=torch.int64)],
        "step": 7,
    }


def measured(tool: Tool, name: str, states: StatePair, folder: Path) -> Outcome:
    return outcome_of(name, lambda: measure_tool(tool, name, states, folder / f"state{tool.suffix}"))


@pytest.mark.parametrize("name", COMMON_TOOLS)
def test_common_tools_pass_the_gate_with_a_nested_state(name: str, tmp_path: Path) -> None:
    states = StatePair(state())
    figures = measured(COMMON_TOOLS[name], name, states, tmp_path).figures
    assert min(figures[measure] for measure in (SAVE, WARM, INTO_WARM)) > 0 and figures[STORED] > states.nbytes / 2
    assert list(tmp_path.iterdir()) == []
    check_equal(states.target, states.source, name)


def test_a_kept_checkpoint_is_moved_once_it_was_measured_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    for name, tool in COMMON_TOOLS.items():
        with case(name):
            states, kept = StatePair(state()), folder / name
            for _ in range(2):
                measure_tool(tool, name, states, tmp_path / "state", (), keep=kept)
                assert [path.name for path in tmp_path.iterdir()] == ["kept"]
            check_equal(tool.load(kept), tool.view(states.source), name)


def test_gate_detects_every_change() -> None:
    def seeded() -> dict[str, Any]:
        torch.manual_seed(0)
        return state()

    saved = seeded()
    check_equal(seeded(), saved, "same")
    differs = "torch loaded (values that differ from the saved ones|a structure that differs from the saved one)"
    for name, change in {
        "a bit": lambda s: s["model"]["wte"].view(torch.int32)[3, 5].bitwise_xor_(1),
        "-0.0 for 0.0": lambda s: s["moments"][0].view(torch.int16).fill_(-(2**15)),
        "0.0 for NaN": lambda s: s["model"].update(bias=torch.zeros(2)),
        "no tensor": lambda s: s["moments"].pop(),
        "another number": lambda s: s.update(step=8),
        "another dtype": lambda s: s["moments"].__setitem__(1, torch.ones(5, dtype=torch.int32)),
        "another shape": lambda s: s["moments"].__setitem__(1, torch.ones(5, 1, dtype=torch.int64)),
    }.items():
        change(loaded := seeded())
        with case(name), pytest.raises(GateError, match=differs):
            check_equal(loaded, saved, "torch")


class LoadsNothing(TorchTool, frozen=True):
    """Leaves the target as it is."""

    load_into = LoadsZeros.load_into


class FailsToSave(TorchTool, frozen=True):
    """Raises after it wrote something."""

    def save(self, state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise TypeError("no such thing\nand more")


def test_tool_that_loads_other_values_or_fails_leaves_no_file(tmp_path: Path) -> None:
    for arm in (LoadsNothing(), LoadsZeros()):
        states = StatePair({"w": torch.ones(8)})
        # Values of an earlier load in the target must not pass the gate.
        states.target["w"].copy_(states.source["w"])
        with case(arm), pytest.raises(GateError):
            measured(arm, "torch", states, tmp_path)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(GateError):
            measure_tool(arm, "torch", states, tmp_path / "state", keep=tmp_path / "kept")
        assert list(tmp_path.iterdir()) == []
    outcome = measured(FailsToSave(), "torch", StatePair(state()), tmp_path)
    assert (outcome.status, outcome.figures, list(tmp_path.iterdir())) == ("not-run", {}, [])
    assert outcome.reason == "torch cannot store this state: no such thing"


def test_state_that_cannot_be_filled_is_only_loaded_into_new_memory(tmp_path: Path) -> None:
    states = StatePair({"w": torch.ones(8), "scalar": np.float32(2)})
    assert not states.fillable
    figures = measured(COMMON_TOOLS["tensorkeep"], "tensorkeep", states, tmp_path).figures
    assert WARM in figures and INTO_WARM not in figures
    with pytest.raises(UsageError, match="holds no tensor"):
        StatePair({"step": 1})


def test_optimizer_adds_twice_the_weights(tmp_path: Path) -> None:
    model = "openllama-3b:scale=0.0005:layers=1"
    settings = WORKLOAD.parse_settings({"model": model, "with_optimizer": "adamw"})
    subject = WORKLOAD.prepare(settings, [], tmp_path)[0].subject
    weights = parse(model)
    assert subject.tensors == 4 * len(weights.shapes)
    # The step of each parameter is a float32 tensor of its own.
    assert subject.bytes == 3 * weights.nbytes + 4 * len(weights.shapes)
    assert set(subject.dtypes) == {"bfloat16", "float32"}


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_flipped_bit_is_one_bit_and_is_found(compression: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save({"small": torch.ones(10), "large": torch.randn(5_000_000)}, path, compression=compression)
    before = {file: file.read_bytes() for file in files_of(path)}
    flip = flip_bit(path)
    differing = [(file, content) for file, content in before.items() if file.read_bytes() != content]
    assert [file.name for file, _ in differing] == [flip.file]
    assert flip.before ^ flip.after == 1 and flip.name == "large"
    [problem] = verify(path).problems
    assert (problem.file, problem.name, problem.block) == (flip.file, flip.name, flip.block)
