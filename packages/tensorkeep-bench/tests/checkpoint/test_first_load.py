"""First loads in a new process: figures, the gate, and errors of tools."""

import os
from pathlib import Path

import pytest
import torch

from broken_tools import LoadsZeros, Raises
from checkpoint.test_workload import state
from tensorkeep.testing.cases import case
from tensorkeep_bench.checkpoint.measure import (
    FIRST,
    FIRST_LOADS,
    INTO_FIRST,
    first_load,
    measure_tool,
    run_in_new_process,
)
from tensorkeep_bench.checkpoint.states import StatePair, digest
from tensorkeep_bench.checkpoint.tools import COMMON_TOOLS, Tool
from tensorkeep_bench.workload import GateError

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(COMMON_TOOLS))
def test_first_loads_pass_the_gate(name: str, tmp_path: Path) -> None:
    tool = COMMON_TOOLS[name]
    figures = measure_tool(tool, name, StatePair(state()), tmp_path / f"x{tool.suffix}", FIRST_LOADS).figures
    assert figures[FIRST] > 0 and figures[INTO_FIRST] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_each_call_has_its_own_process_and_errors_and_other_values_are_raised(tmp_path: Path) -> None:
    assert len({os.getpid(), *(run_in_new_process(os.getpid) for _ in range(2))}) == 3
    tool: Tool = Raises()
    with pytest.raises(ValueError, match="no such thing"):
        first_load(tool, tmp_path / "x.pt", StatePair(state()).expected_from(tool), "raises")
    tool, states = LoadsZeros(), StatePair({"w": torch.ones(8)})
    for into in (False, True):
        with case(f"into={into}"), pytest.raises(GateError, match="zeros loaded values that differ"):
            first_load(tool, tmp_path / "x.pt", states.expected_from(tool), "zeros", into=into)
    with pytest.raises(ChildProcessError, match="exit code 3"):
        run_in_new_process(os._exit, 3)


def test_digest_depends_on_structure_names_dtypes_and_every_bit() -> None:
    first = {"a": torch.zeros(4), "b": 1}
    tensors = torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), -torch.zeros(4)
    others = [{**first, "b": 2}, {"c": torch.zeros(4), "b": 1}, *({**first, "a": tensor} for tensor in tensors)]
    assert digest(first) == digest({"b": 1, "a": torch.zeros(4)})
    assert len({digest(one) for one in [first, *others]}) == 6
