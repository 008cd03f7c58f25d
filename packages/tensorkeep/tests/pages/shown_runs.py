"""Checkpoints and runs to show: hostile names, values that are not finite, shared bytes, frozen layers."""

import json
import math
from pathlib import Path

import torch

import tensorkeep

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;<!--"
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.uint8)


def save_model(path: Path, *, layers: int = 6) -> Path:
    """Save a model with an optimizer, a view, tensors of many dtypes, NaN, zeros, and names that are HTML."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    embedding = normal(400, 64).bfloat16()
    qkv, up = ([normal(rows, 64).bfloat16() for _ in range(layers)] for rows in (192, 256))
    blocks = [{"attention": {"qkv": a}, "mlp": {"up": b, "b": torch.zeros(256)}} for a, b in zip(qkv, up, strict=True)]
    model = {"embedding": embedding, "head": embedding, "blocks": blocks, HOSTILE: normal(30, 30)}
    broken = normal(500)
    broken[3], broken[5] = math.nan, math.inf
    moments = [{"exp_avg_sq": normal(256, 64) ** 4, "step": torch.tensor(7.0)} for _ in range(layers)]
    others = {str(dtype).removeprefix("torch."): (normal(64) * 50).to(dtype) for dtype in DTYPES}
    state = {"model": model, "optimizer": {"state": moments}, "others": {**others, "broken": broken}}
    metadata = {"note": HOSTILE, "run": {"name": "unit"}}
    tensorkeep.save(state, path, compression="lossless", metadata=metadata)
    return path


def save_run(path: Path, *, steps: int = 6) -> Path:
    """Save a run of which a layer is frozen, with the log that ``tensorkeep train`` writes."""
    generator = torch.Generator().manual_seed(1)
    model = {f"blocks.{layer}.w": torch.randn(64, 64, generator=generator) for layer in range(5)}
    model["head.weight"] = torch.randn(64, 64, generator=generator)
    with tensorkeep.CheckpointManager(path / "checkpoints", incremental=True) as manager:
        for step in range(1, steps + 1):
            for name, tensor in model.items():
                if name != "blocks.0.w":
                    tensor += 0.01 / step * torch.randn(tensor.shape, generator=generator)
            manager.save(step * 100, {"model": model}, metrics={"validation_loss": 3.0 / step})
    lines = [
        {"step": step, "kind": "train", "loss": 4 / (1 + step / 100), "gradient_norm": 1.0 + step % 7}
        | {"learning_rate": 1e-4 * step, "tokens_per_second": 20_000 + step}
        for step in range(10, steps * 100 + 1, 10)
    ]
    evaluation = {"kind": "evaluate", "best": 1.0}
    lines += [{"step": step * 100, "validation_loss": 3.0 / step, **evaluation} for step in range(1, steps + 1)]
    (path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 999, "ki')
    return path
