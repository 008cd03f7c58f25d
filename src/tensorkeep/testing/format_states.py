"""The states that the conformance suite of formats saves, and `load`, which uses the contract of `Reader` only."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tensorkeep.formats.base import Reader
from tensorkeep.state.aliases import make_view
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.tree import unflatten
from tensorkeep.storage.direct_io import Bytes


def noise(dtype_name: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, which include NaN payloads and denormals."""
    dtype = BY_NAME[dtype_name]
    tensor: torch.Tensor = allocate("tensor", dtype, shape)
    leaf = Leaf.of("x", tensor)
    assert leaf is not None
    bits: Bytes = np.random.default_rng(seed).integers(0, 256, leaf.nbytes, np.uint8)
    leaf.write(0, leaf.nbytes, np.minimum(bits, 1) if dtype.kind == "bool" else bits)
    return tensor


def training_state() -> dict[str, Any]:
    """Return a small training state: tied weights, parameters, an optimizer's nested state, plain values."""
    weight = noise("bfloat16", 40, 30)
    return {
        "model": OrderedDict(embed=weight, head=weight, bias=noise("float32", 7), half=weight[:20], turned=weight.t()),
        "optimizer": {
            "state": {
                0: {"step": torch.tensor(7.0), "exp_avg": noise("float32", 40, 30, seed=1)},
                1: {"step": torch.tensor(8.0), "exp_avg": noise("float32", 7, seed=2)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "parameter": torch.nn.Parameter(torch.linspace(0, 1, 5)),
        "step": 2**70,
        "losses": [float("nan"), -0.0, float("inf")],
    }


STATES: dict[str, Callable[[], Any]] = {
    "flat": lambda: {"z": noise("float32", 3, 4), "a": noise("uint8", 5), "m": noise("float64", 2)},
    "training": training_state,
    "empty": dict,
    "no tensor": lambda: {"step": 3},
    "bare tensor": lambda: noise("float16", 4, 5),
    "list": lambda: [noise("int32", 2), (noise("int64", 1), "text"), b"\0\xff"],
    "shapes": lambda: {"0-d": noise("int64"), "none": noise("float32", 0, 3), "one": noise("int16", 1, 1, 1)},
    "layouts": lambda: {
        "transposed": noise("float32", 6, 4).t(),
        "strided": noise("float64", 9, 8)[::2, 1::3],
        "expanded": noise("bfloat16", 1, 5).expand(4, 5),
        "row": noise("float32", 500, 3)[7],
        "conjugated": noise("complex64", 5).conj(),
    },
    "names": lambda: {"ünï.cödé/☃": noise("int8", 3), "": {"": noise("int8", 2)}, "a.b": {"c": noise("int8", 1)}},
    "several blocks": lambda: {"large": noise("float32", 4_500_000), "small": noise("int8", 3)},
}


def load(reader: Reader) -> Any:
    """Return the state of an open checkpoint, through the contract of `Reader` alone."""
    values: dict[str, Any] = {}
    for name, stored in reader.flat.leaves.items():
        values[name] = allocate(reader.leaf_specs[name].kind, stored.dtype, stored.shape)
        leaf = Leaf.of(name, values[name])
        assert leaf is not None
        out = leaf.host_bytes()
        assert out is not None
        reader.read(name, 0, stored.nbytes, out)
    for name, alias in reader.flat.aliases.items():
        values[name] = make_view(values[alias.of], alias)
    return unflatten(reader.flat.skeleton, values)
