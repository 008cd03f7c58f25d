"""Every installed tool passes the gate, and invalid settings are refused."""

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint import FileSystemWriter

import tensorkeep
from tensorkeep.errors import UsageError
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep_bench.checkpoint.measure import LOADS, SAVE, STORED, WRITTEN, measure_tool
from tensorkeep_bench.checkpoint.states import StatePair, check_equal
from tensorkeep_bench.checkpoint.tools import TorchTool, parse_tool, to_arrays, to_tensors, use_of

SETTINGS = [
    *({"tool": tool} for tool in ["torch", "safetensors", "dcp", "tensorstore", "t5x", "orbax", "zipnn", "tensorkeep"]),
    {"tool": "torch", "crc32": False},
    {"tool": "dcp", "threads": 2},
    {"tool": "tensorstore", "zarr": 2, "chunk": "64", "compressor": "as-documented", "in_flight": "one"},
    {"tool": "tensorstore", "dtype": "float32"},
    {"tool": "tensorkeep", "compression": "lossless", "direct_io": False, "threads": 1, "verify": False},
]


def state() -> dict[str, Any]:
    return {
        "a": torch.randn(70, 90).to(torch.bfloat16),
        "b": {"half": torch.randn(300).half(), "t": torch.randn(8, 5).t(), "counts": torch.arange(9)},
        "scalar": torch.tensor(3.0),
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_tool_loads_what_it_saved(settings: dict[str, Any], tmp_path: Path) -> None:
    tool = parse_tool(settings)
    if reason := tool.missing():
        assert importlib.util.find_spec(tool.package) is None
        pytest.skip(reason)
    found = measure_tool(tool, "one", StatePair(state()), tmp_path / f"state{tool.suffix}")
    assert {SAVE, STORED, WRITTEN} <= found.figures.keys()
    assert set(LOADS) - found.figures.keys() <= {"load_cold", "into_cold"}
    assert list(tmp_path.iterdir()) == []


def test_invalid_settings_are_refused() -> None:
    for settings, expected in (
        ({}, "the setting 'tool' is missing"),
        ({"tool": "tosch"}, "the tool 'tosch' does not exist"),
        ({"tool": ["torch"]}, "the tool ['torch'] does not exist"),
        ({"tool": "dcp", "thread": 2}, "tool 'dcp' has no field 'thread'\ndid you mean 'threads'?"),
        ({"tool": "dcp", "threads": 0}, "tool 'dcp': threads: expected `int` >= 1"),
        ({"tool": "dcp", "threads": "two"}, "tool 'dcp': threads: expected `int`, got `str`"),
        ({"tool": "safetensors", "x": 1}, "tool 'safetensors' has no field 'x'\nits fields: none"),
        ({"tool": "tensorkeep", "compression": "lossles"}, "there is no compression 'lossles'"),
        ({"tool": "tensorstore", "compressor": "gzipp"}, "gzipp"),
        ({"tool": "tensorstore", "concurrency": -1}, "concurrency"),
        ({"tool": "t5x", "compressor": "gzipp"}, "gzipp"),
    ):
        with case(settings), pytest.raises(UsageError, match=re.escape(expected)):
            parse_tool(settings)


def test_torch_without_crc_restores_the_default_and_saves_a_full_training_state(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    TorchTool(crc32=False).save({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert torch.serialization.get_crc32_options() is before is True
    state = {"w": torch.ones(3), "rng": tensorkeep.RandomState().state_dict(), "loss": np.float64(2.5)}
    TorchTool().save(state, tmp_path / "a.pt")
    assert difference(TorchTool().load(tmp_path / "a.pt"), state) is None


def test_arrays_share_memory_and_keep_the_dtype() -> None:
    tensors = {"b": torch.randn(4, 5).bfloat16(), "f": torch.randn(3), "s": torch.tensor(2.0).bfloat16()}
    arrays = to_arrays(tensors)
    assert arrays["b"].dtype.name == "bfloat16"
    assert arrays["f"].ctypes.data == tensors["f"].data_ptr()
    back = to_tensors(arrays)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_the_use_of_an_arm_is_a_call_that_saves_like_it(tmp_path: Path) -> None:
    names = {"tensorkeep": tensorkeep, "torch": torch, "safetensors": safetensors, "FileSystemWriter": FileSystemWriter}
    for place, settings in enumerate(
        [
            {"tool": "torch"},
            {"tool": "torch", "crc32": False},
            {"tool": "safetensors"},
            {"tool": "dcp", "threads": 2},
            {"tool": "tensorkeep", "compression": "lossless", "direct_io": False, "threads": 2, "verify": False},
            {"tool": "tensorstore", "zarr": 2, "chunk": "64", "compressor": None, "concurrency": 1, "in_flight": "one"},
            {"tool": "t5x", "chunk": "1MiB"},
        ]
    ):
        tool, source = parse_tool(settings), {"w": torch.randn(5, 3)}
        path = tmp_path / f"{place}{tool.suffix}"
        with case(settings), warnings.catch_warnings():
            # DCP warns that it saves in one process.
            warnings.simplefilter("ignore")
            default = torch.serialization.get_crc32_options()
            try:
                exec(use_of(settings), {**names, "state": source, "tensors": source, "path": path})
            finally:
                torch.serialization.set_crc32_options(default)
            check_equal(tool.load(path), source, "use")
    assert use_of({"tool": "tensorkeep", "threads": 2}) == "tensorkeep.save(state, path, threads=2)"
    assert use_of({"tool": "no such tool"}) == use_of({}) == ""
