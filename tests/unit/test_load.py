"""Loading: into new memory, into existing tensors, in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.testing.equality import same


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.w": torch.randn(64, 33, generator=generator).bfloat16() for i in range(3)}


def training_state() -> dict[str, Any]:
    return {"model": model(), "optimizer": {"m": [torch.ones(5), torch.zeros(2)], "lr": 0.1}, "step": 4}


@pytest.fixture(params=["none", "lossless"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    holdfast.save(training_state(), tmp_path / "ckpt", compression=request.param)
    return tmp_path / "ckpt"


def zeros(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(value) for value in state] if isinstance(state, list) else state


def test_into_fills_the_given_memory(path: Path) -> None:
    target = zeros(training_state()) | {"step": 0}
    tensor = target["model"]["layers.1.w"]
    address = tensor.data_ptr()
    found = holdfast.load(path, into=target)
    assert same(found, training_state())
    assert found["model"]["layers.1.w"].data_ptr() == address
    assert same(tensor, model()["layers.1.w"])
    assert found["step"] == 4


def test_into_a_module_and_its_optimizer(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = torch.nn.Linear(10, 10)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.randn(2, 10)).sum().backward()
        optimizer.step()
        return module, optimizer

    module, optimizer = build(0)
    holdfast.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    other, other_optimizer = build(1)
    found = holdfast.load(tmp_path / "c", into={"model": other.state_dict(), "optimizer": other_optimizer.state_dict()})
    assert same(dict(other.state_dict()), dict(module.state_dict()))
    other_optimizer.load_state_dict(found["optimizer"])
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_into_strided_tensors_and_arrays(tmp_path: Path) -> None:
    state = {"t": torch.arange(5000.0).reshape(50, 100), "a": np.arange(300, dtype=np.int32).reshape(20, 15)}
    holdfast.save(state, tmp_path / "c")
    target = {"t": torch.zeros(100, 50).T, "a": np.zeros((15, 40), np.int32)[:, ::2].T}
    holdfast.load(tmp_path / "c", into=target)
    assert torch.equal(target["t"], state["t"])
    assert np.array_equal(target["a"], state["a"])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda s: s["model"].pop("layers.1.w"), "only in the checkpoint: model.layers.1.w"),
        (lambda s: s["model"].update(new=torch.ones(1)), "only in the state: model.new"),
        (
            lambda s: s["model"].update({"layers.1.w": torch.zeros(33, 64).bfloat16()}),
            r"bfloat16 \[33, 64\] in the state",
        ),
        (lambda s: s["model"].update({"layers.1.w": torch.zeros(64, 33)}), r"float32 \[64, 33\] in the state"),
        (
            lambda s: s["model"].update({"layers.1.w": torch.zeros(33).bfloat16().expand(64, 33)}),
            "not writable in place: model.layers.1.w",
        ),
        (
            lambda s: s["model"].update({"layers.1.w": s["model"]["layers.0.w"]}),
            "'model.layers.1.w' shares its storage with 'model.layers.0.w'",
        ),
    ],
    ids=["missing", "extra", "shape", "dtype", "overlapping", "tied"],
)
def test_what_does_not_fit_is_named_and_nothing_touched(path: Path, edit: Any, said: str) -> None:
    target = zeros(training_state())
    edit(target)
    with pytest.raises(holdfast.StateMismatchError, match=said) as caught:
        holdfast.load(path, into=target)
    assert caught.value.missing or caught.value.extra or caught.value.different or "writable" in said
    assert not target["model"]["layers.0.w"].any()
    assert not target["optimizer"]["m"][0].any()


def test_select(path: Path) -> None:
    found = holdfast.load(path, select="model.layers.[02].*")
    assert same(found, {"model": {k: v for k, v in model().items() if "1" not in k}, "step": 4})
    assert list(holdfast.load(path, select=["optimizer.m.1"])["optimizer"]["m"]) == [
        None,
        pytest.approx(torch.zeros(2)),
    ]
    with pytest.raises(holdfast.UsageError, match="no tensor matches"):
        holdfast.load(path, select="nodel.*")


def test_select_into_fills_only_those(path: Path) -> None:
    target = {"model": zeros(model())}
    holdfast.load(path, into=target, select="model.layers.2.w")
    assert same(target["model"]["layers.2.w"], model()["layers.2.w"])
    assert not target["model"]["layers.0.w"].any()


def test_tied_weights_come_back_tied(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    qkv = torch.arange(30.0)
    holdfast.save({"a": w, "b": w, "t": w.T, "qkv": qkv, "k": qkv[10:20]}, tmp_path / "c")
    assert holdfast.info(tmp_path / "c").total.nbytes == w.nbytes + qkv.nbytes
    found = holdfast.load(tmp_path / "c")
    assert found["a"] is found["b"]
    found["a"][0, 1] = -1
    found["qkv"][10] = -2
    assert found["t"][1, 0] == -1
    assert found["k"][0] == -2
    # A view that is asked for without what it looks into brings only itself.
    assert same(holdfast.load(tmp_path / "c", select="k"), {"k": qkv[10:20]})


def test_a_view_into_a_tensor_of_its_own(tmp_path: Path) -> None:
    qkv = torch.arange(30.0)
    holdfast.save({"qkv": qkv, "k": qkv[10:20]}, tmp_path / "c")
    target = {"qkv": torch.zeros(30), "k": torch.zeros(10)}
    holdfast.load(tmp_path / "c", into=target)
    assert same(target, {"qkv": qkv, "k": qkv[10:20].clone()})


def test_device_and_into_exclude_each_other(path: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="exclude each other"):
        holdfast.load(path, into={}, device="cpu")


def test_progress_reaches_the_total(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    holdfast.load(path, progress=lambda done, total: calls.append((done, total)))
    total = holdfast.info(path).total.nbytes
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
