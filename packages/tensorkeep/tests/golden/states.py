"""The state that the golden checkpoints hold, spelled out in bits."""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def bits(pattern: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor whose little-endian bytes are the hexadecimal digits."""
    return torch.frombuffer(bytearray.fromhex(pattern), dtype=torch.uint8).view(dtype).reshape(shape)


def state() -> dict[str, Any]:
    """Return the state: every kind of node and leaf, NaN payloads, -0.0, denormals, a tied and a sliced tensor."""
    weight = bits("803f 0080 c17f 0100 80ff 40c0", torch.bfloat16, 2, 3)
    return {
        "model": OrderedDict(
            {
                "layers.0.weight": weight,
                "tied": weight,
                "row": weight[1],
                "f32": bits("0000803f 00000080 010000c0 ffff7f7f", torch.float32, 4),
                "f16": bits("003c 0080 017e", torch.float16, 3),
                "f64": bits("000000000000f03f", torch.float64),
                "f8": bits("387f", torch.float8_e4m3fn, 2),
                "i64": bits("ffffffffffffff7f", torch.int64, 1),
                "mask": torch.tensor([True, False, True]),
                "c128": bits("000000000000f03f000000000000f0bf", torch.complex128, 1),
                "empty": torch.empty(0, 5),
                "frozen": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
            }
        ),
        "optimizer": {
            "state": {
                0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(2000, dtype=torch.float32).reshape(40, 50)}
            },
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "amsgrad": False, "maximize": None, "params": [0]}],
        },
        "numpy": {"tokens": np.arange(6, dtype=np.uint16).reshape(2, 3), "scalar": np.float32(1.5)},
        "plain": {"int": -7, "big": 2**80, "inf": float("inf"), "text": "h\u00f6ld\u2192fast", "bytes": b"\x00\xff"}
        | {"": None, 1: "one", "1": "text one", "size": torch.Size([2, 3]), "dtype": torch.bfloat16},
    }


def later() -> dict[str, Any]:
    """Return the state some steps later: some tensors changed, one slightly, one was added, one removed."""
    found = state()
    found["model"]["f16"] = bits("003c 0080 027e", torch.float16, 3)
    found["model"]["new"] = torch.tensor([1, 2, 3], dtype=torch.int16)
    del found["model"]["f64"]
    moments = found["optimizer"]["state"][0]
    moments["exp_avg"] = (moments["exp_avg"].view(torch.int32) + 3).view(torch.float32)
    found["plain"]["int"] = -8
    return found
