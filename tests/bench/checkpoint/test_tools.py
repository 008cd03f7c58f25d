"""Every tool that is installed passes the gate; wrong settings are one clear line."""

import importlib.util

import numpy as np
import pytest
import torch
from tensorkeep.bench.checkpoint.subject import Subject
from tensorkeep.bench.checkpoint.tools.arrays import to_arrays, to_tensors
from tensorkeep.bench.checkpoint.tools.known import make
from tensorkeep.bench.checkpoint.tools.torch_tool import TorchTool

import tensorkeep
from tensorkeep.bench.checkpoint.measure import LOADS, SAVE, STORED, WRITTEN, visit
from tensorkeep.errors import UsageError
from tensorkeep.testing.equality import difference

SETTINGS = [
    {"tool": "torch"},
    {"tool": "torch", "crc32": False},
    {"tool": "safetensors"},
    {"tool": "dcp"},
    {"tool": "dcp", "threads": 2},
    {"tool": "tensorstore"},
    {
        "tool": "tensorstore",
        "zarr": 2,
        "chunk": "64",
        "compressor": "as-documented",
        "dtype": "float32",
        "in_flight": "one",
    },
    {"tool": "t5x"},
    {"tool": "orbax"},
    {"tool": "zipnn"},
    {"tool": "tensorkeep"},
    {"tool": "tensorkeep", "compression": "lossless", "direct_io": False, "threads": 1, "verify": False},
]


def state():
    return {
        "a": torch.randn(70, 90).to(torch.bfloat16),
        "b": {"half": torch.randn(300).half(), "t": torch.randn(8, 5).t(), "counts": torch.arange(9)},
        "scalar": torch.tensor(3.0),
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_tool_gives_back_what_it_saved(settings, tmp_path):
    tool = make(settings)
    if tool.missing():
        assert tool.needs is not None
        assert importlib.util.find_spec(tool.needs) is None
        pytest.skip(tool.missing())
    found = visit(tool, "one", Subject(state()), tmp_path / f"state{tool.suffix}")
    assert {SAVE, STORED, WRITTEN} <= found.figures.keys()
    assert set(LOADS) - found.figures.keys() <= {"load_cold", "into_cold"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no 'tool' is given"),
        ({"tool": "tosch"}, "there is no tool 'tosch'"),
        ({"tool": ["torch"]}, "there is no tool ['torch']"),
        ({"tool": "dcp", "thread": 2}, "tool 'dcp' has no setting 'thread'\ndid you mean 'threads'?"),
        ({"tool": "dcp", "threads": 0}, "tool 'dcp': setting 'threads': Expected `int` >= 1"),
        ({"tool": "dcp", "threads": "two"}, "tool 'dcp': setting 'threads': Expected `int`, got `str`"),
        ({"tool": "safetensors", "x": 1}, "tool 'safetensors' has no setting 'x'\nits settings: none"),
        ({"tool": "tensorkeep", "compression": "lossles"}, "there is no compression 'lossles'"),
        ({"tool": "tensorstore", "compressor": "gzipp"}, "gzipp"),
        ({"tool": "tensorstore", "concurrency": -1}, "concurrency"),
        ({"tool": "t5x", "compressor": "gzipp"}, "gzipp"),
    ],
)
def test_wrong_settings_are_told(settings, said):
    with pytest.raises(UsageError) as caught:
        make(settings)
    assert said in str(caught.value)


def test_torch_without_crc_leaves_the_default_as_it_was(tmp_path):
    before = torch.serialization.get_crc32_options()
    TorchTool(crc32=False).save({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert torch.serialization.get_crc32_options() is before is True


def test_arrays_share_memory_and_keep_the_dtype():
    tensors = {
        "b": torch.randn(4, 5).to(torch.bfloat16),
        "f": torch.randn(3),
        "s": torch.tensor(2.0).to(torch.bfloat16),
    }
    arrays = to_arrays(tensors)
    assert arrays["b"].dtype.name == "bfloat16"
    assert arrays["f"].ctypes.data == tensors["f"].data_ptr()
    back = to_tensors(arrays)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_torch_saves_a_whole_training_state(tmp_path):
    state = {"w": torch.ones(3), "rng": tensorkeep.RandomState().state_dict(), "loss": np.float64(2.5)}
    TorchTool().save(state, tmp_path / "a.pt")
    assert difference(TorchTool().load(tmp_path / "a.pt"), state) is None
