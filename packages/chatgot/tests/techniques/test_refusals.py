"""What each technique refuses: settings out of bounds, other techniques, configurations, and machines without CUDA."""

from typing import Any

import pytest
import torch

from chatgot.techniques import attention_kernel
from chatgot.techniques.base import TECHNIQUE_CLASSES, Machine
from chatgot.techniques.stack import Stack
from chatgot.testing import TINY
from tensorkeep.errors import UnsupportedError, UsageError

ON_CPU = Machine(torch.device("cpu"))
COMPILED = {"techniques.compile": "on", "model.dropout": 0}
WIDE_SWIGLU = {"model.d_model": 256, "model.d_ff": 1024, "model.activation": "swiglu"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("activation-checkpointing", {"every": 0}, "every is 0"),
        ("activation-swapping", {"ahead": -1}, "ahead is -1"),
        ("activation-swapping", {"least": 0}, "least is 0"),
        ("allocator", {"max_split_size_mb": 20}, "max_split_size_mb is 20"),
        ("allocator", {"garbage_collection_threshold": 1.0}, "garbage_collection_threshold is 1"),
        ("attention-kernel", {"kernel": "fast"}, "kernel is 'fast'"),
        ("compile", {"mode": "max-autotune", "backend": "aot_eager"}, "inductor"),
        ("cpu-threads", {"threads": 0}, "threads is 0"),
        *(("cpu-threads", {"cores": text}, "cores is") for text in ("", "a", "3-1", "1-2-3", "0,", "-1", "0-99999999")),
        ("gradient-accumulation", {"batches": 1}, "batches is 1"),
        ("loss-curriculum", {"candidates": 1}, "candidates"),
        ("loss-curriculum", {"begin": -0.1}, "begin"),
        ("loss-curriculum", {"end": 1.1}, "end"),
        ("lr-plateau", {"patience": 0}, "patience"),
        *(("lr-plateau", {"factor": factor}, "factor") for factor in (0.0, 1.0)),
        ("lr-range-test", {"lowest": 0.1, "highest": 0.1}, r"highest is 0\.1"),
        ("pipeline-parallel", {"parts": 0}, "parts"),
        ("progressive-length", {"pieces": [4, 2], "shares": [0.5, 0.5]}, r"pieces is \[4, 2\]"),
        ("progressive-length", {"pieces": [2, 4, 1]}, "pieces is"),
        ("progressive-length", {"pieces": []}, "pieces is"),
        ("progressive-length", {"pieces": [4, 0, 1]}, r"pieces is \[4, 0, 1\]|\$\.pieces\[1\]"),
        ("progressive-length", {"shares": [0.5, 0.5]}, "shares is .* for 3 stages"),
        ("progressive-length", {"shares": [0.5, 0.5, 0.5]}, "shares is"),
        ("progressive-length", {"shares": [0.5, 0.5, 0.0]}, r"shares is \[0.5, 0.5, 0.0\]|\$\.shares\[2\]"),
        ("sparse-attention", {"block": 0}, "block"),
        ("sparse-attention", {"keep": 0}, "keep"),
    ],
)
def test_settings_have_bounds(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: .*({message})"):
        Stack.of({name: settings})
    with pytest.raises(UsageError, match=message):
        TECHNIQUE_CLASSES.get(name).Settings(**settings)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("activation-function", "pipeline-parallel", "each process has only some"),
        ("ddp", "fsdp", "both need all ranks"),
        *(("length-curriculum", other, "") for other in ("ddp", "fsdp", "pipeline-parallel")),
        ("lr-plateau", "lr-range-test", "each sets the schedule"),
    ],
)
def test_techniques_conflict(first: str, second: str, reason: str) -> None:
    message = f"({first} and {second}|{second} and {first}) cannot be combined: .*{reason}"
    with pytest.raises(UsageError, match=message):
        Stack.of({first: {}, second: {}})


@pytest.mark.parametrize(
    ("name", "settings", "changes", "message"),
    [
        ("attention-kernel", {"kernel": "flash"}, {}, "no dropout on a CPU"),
        ("attention-kernel", {"kernel": "fa3"}, {}, "the attention kernel 'fa3' has no dropout, and this model has"),
        *(("attention-kernel", {"kernel": kernel}, {}, "no dropout") for kernel in ("flex", "matmul")),
        ("attention-kernel", {"kernel": "matmul"}, COMPILED, "cannot be seen in compiled code"),
        ("activation-function", {"activation": "swiglu"}, WIDE_SWIGLU, r"(?s)\+50% parameters.*width of 688"),
        ("fused-optimizer", {}, {"optim.implementation": "foreach"}, r"optim\.implementation is 'foreach'"),
        ("lora", {}, {"optim.name": "muon", "techniques.lora": "on"}, "'muon', which is for full matrices"),
        ("lr-plateau", {}, {"eval.every": 0}, r"eval\.every is 0"),
        ("lr-range-test", {}, {"optim.name": "muon"}, "muon has two"),
        ("progressive-length", {"pieces": [3, 1], "shares": [0.5, 0.5]}, {}, "a context of 16 cannot be cut into 3"),
        ("quantised-forward", {"mode": "float8"}, {}, "unless the scaling is compiled"),
        ("quantised-forward", {"mode": "float8"}, {"techniques.compile": "on", "model.d_model": 24}, "d_model is 24"),
        ("quantised-forward", {"mode": "float8"}, {"techniques.compile": "on", "model.d_ff": 40}, "MLPs is 40"),
        ("sparse-attention", {"block": 4, "keep": 4}, {}, "4 blocks of 4 cover the whole context of 16"),
        ("tensor-parallel", {}, {"optim.name": "muon"}, "orthogonalises full matrices, and tensor-parallel shards"),
    ],
)
def test_configuration_is_refused(name: str, settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Stack.of({name: settings}).configure(TINY.changed(changes))


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_16_bit_kernels_are_refused_with_attention_in_32_bits(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setattr(attention_kernel, "chosen_device", lambda name: torch.device("cuda"))
    stack = Stack.of({"attention-kernel": {"kernel": kernel}})
    with pytest.raises(UsageError, match="16 bits"):
        stack.configure(TINY.changed({"techniques.mixed-precision.attention": "float32"}))
    for changes in ({}, {"techniques.mixed-precision": "on"}, {"techniques.mixed-precision.attention": "same"}):
        config = TINY.changed(changes)
        assert stack.configure(config) == config


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("activation-swapping", "allocator", "cuda-graphs", "optimizer-offload")),
        *(("attention-kernel", {"kernel": kernel}) for kernel in ("efficient", "cudnn", "fa3", "flex")),
        ("compile", {"mode": "reduce-overhead"}),
        ("quantised-forward", {"mode": "float8"}),
        ("triton-kernel", {}),
    ],
)
def test_missing_cuda_is_reported(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"{name} needs a CUDA device.*; the run is on cpu"):
        Stack.of({name: settings}).check(ON_CPU)
