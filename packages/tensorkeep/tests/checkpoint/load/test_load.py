"""Loading into new memory and into existing tensors, all or some."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.formats.finding import open_reader
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.w": torch.randn(64, 33, generator=generator).bfloat16() for i in range(3)}


def training_state() -> dict[str, Any]:
    return {"model": model(), "optimizer": {"m": [torch.ones(5), torch.zeros(2)], "lr": 0.1}, "step": 4}


@pytest.fixture(params=["none", "lossless"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tensorkeep.save(training_state(), tmp_path / "ckpt", compression=request.param)
    return tmp_path / "ckpt"


def zeros(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(value) for value in state] if isinstance(state, list) else state


def test_into_fills_the_given_memory_all_or_some_and_progress_reaches_the_total(path: Path) -> None:
    target = zeros(training_state()) | {"step": 0}
    tensor = target["model"]["layers.1.w"]
    address = tensor.data_ptr()
    calls: list[tuple[int, int]] = []
    found = tensorkeep.load(path, into=target, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (tensorkeep.info(path).total.nbytes,) * 2
    assert calls == sorted(calls)
    assert same(found, training_state())
    assert found["model"]["layers.1.w"].data_ptr() == address
    assert same(tensor, model()["layers.1.w"])
    assert found["step"] == 4
    some = {"model": zeros(model())}
    tensorkeep.load(path, into=some, select="model.layers.2.w")
    assert same(some["model"]["layers.2.w"], model()["layers.2.w"])
    assert not some["model"]["layers.0.w"].any()


def test_into_a_module_and_its_optimizer(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = torch.nn.Linear(10, 10)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.randn(2, 10)).sum().backward()
        optimizer.step()
        return module, optimizer

    module, optimizer = build(0)
    tensorkeep.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    other, other_optimizer = build(1)
    into = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    found = tensorkeep.load(tmp_path / "c", into=into)
    assert same(dict(other.state_dict()), dict(module.state_dict()))
    other_optimizer.load_state_dict(found["optimizer"])
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_into_strided_tensors_and_arrays_and_columns_of_one_buffer(tmp_path: Path) -> None:
    fused = torch.arange(24.0).reshape(4, 6)
    state = {"t": torch.arange(5000.0).reshape(50, 100), "a": np.arange(300, dtype=np.int32).reshape(20, 15)}
    tensorkeep.save({**state, "q": fused[:, :2].clone(), "k": fused[:, 2:].clone()}, tmp_path / "c")
    memory = torch.zeros(4, 6)
    target = {"t": torch.zeros(100, 50).T, "a": np.zeros((15, 40), np.int32)[:, ::2].T}
    tensorkeep.load(tmp_path / "c", into={**target, "q": memory[:, :2], "k": memory[:, 2:]})
    assert torch.equal(target["t"], state["t"])
    assert np.array_equal(target["a"], state["a"])
    assert torch.equal(memory, fused)


WEIGHT = "layers.1.w"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (WEIGHT, None, "only in the checkpoint: model.layers.1.w"),
        ("new", torch.ones(1), "only in the state: model.new"),
        (WEIGHT, torch.zeros(33, 64).bfloat16(), r"bfloat16 \[33, 64\] in the state"),
        (WEIGHT, torch.zeros(64, 33), r"float32 \[64, 33\] in the state"),
        (WEIGHT, torch.zeros(33).bfloat16().expand(64, 33), "not writable in place: model.layers.1.w"),
        (WEIGHT, "layers.0.w", "'model.layers.1.w' shares memory with 'model.layers.0.w'"),
    ],
    ids=["missing", "extra", "shape", "dtype", "overlapping", "tied"],
)
def test_mismatches_are_named_and_nothing_is_touched(path: Path, name: str, given: Any, expected: str) -> None:
    target = zeros(training_state())
    target["model"][name] = target["model"][given] if isinstance(given, str) else given
    if given is None:
        del target["model"][name]
    with pytest.raises(tensorkeep.StateMismatchError, match=expected) as caught:
        tensorkeep.load(path, into=target)
    assert caught.value.missing or caught.value.extra or caught.value.different or "writable" in expected
    assert not target["model"]["layers.0.w"].any()
    assert not target["optimizer"]["m"][0].any()


def test_select_and_a_budget_as_text(path: Path) -> None:
    assert tensorkeep.verify(path, memory_budget="64 MiB").ok
    found = tensorkeep.load(path, select="model.layers.[02].*", memory_budget="64MiB")
    assert same(found, {"model": {k: v for k, v in model().items() if "1" not in k}, "step": 4})
    assert same(tensorkeep.load(path, select=["optimizer.m.1"])["optimizer"]["m"], [None, torch.zeros(2)])
    with pytest.raises(tensorkeep.UsageError, match="no tensor matches"):
        tensorkeep.load(path, select="nodel.*")


def test_tied_weights_and_views_come_back_tied_unless_one_is_loaded_alone(tmp_path: Path) -> None:
    w, matrix = torch.arange(12.0).reshape(3, 4), torch.arange(10_000.0).reshape(100, 100)
    views = {"row": matrix[7], "column": matrix[:, 7], "row2": matrix[8]}
    tensorkeep.save({"a": w, "b": w, "t": w.T, "matrix": matrix, **views}, tmp_path / "c")
    assert tensorkeep.info(tmp_path / "c").total.nbytes == w.nbytes + matrix.nbytes
    found = tensorkeep.load(tmp_path / "c")
    assert found["a"] is found["b"]
    found["a"][0, 1] = -1
    found["matrix"][7, 0] = -2
    assert (found["t"][1, 0], found["row"][0]) == (-1, -2)
    # A view that is asked for without what it looks into brings only itself.
    for name in ("row", "column"):
        alone = tensorkeep.load(tmp_path / "c", select=name)
        assert same(alone, {name: views[name].clone()})
        assert alone[name].untyped_storage().nbytes() == 400
    both = tensorkeep.load(tmp_path / "c", select="row*")
    assert both["row"].untyped_storage().data_ptr() == both["row2"].untyped_storage().data_ptr()


def test_memory_must_be_shared_in_the_checkpoint_as_in_the_state(tmp_path: Path) -> None:
    base, memory, other = torch.arange(10), torch.full((10,), -1), torch.full((2,), -1)
    tensorkeep.save({"a": base, "c": torch.ones(2, dtype=torch.int64), "b": base[:2]}, tmp_path / "c")
    for given, expected in (
        (memory[4:6], "'b' shares memory with 'a'"),
        (memory[4:7], r"\[3\] in the state"),
        (other, "shares memory with 'c'"),
    ):
        with case(expected), pytest.raises(tensorkeep.StateMismatchError, match=expected):
            tensorkeep.load(tmp_path / "c", into={"a": memory, "c": other, "b": given})
        assert (memory == -1).all()
        assert (other == -1).all()


def test_a_single_tied_name_and_given_parameters_are_filled_and_returned(tmp_path: Path) -> None:
    w = torch.arange(5.0)
    tensorkeep.save({"a": w, "b": w, "p": w + 1, "v": torch.nn.Parameter(torch.ones(2))}, tmp_path / "c")
    memory, parameter, v = torch.full((5,), 9.0), torch.nn.Parameter(torch.zeros(5)), torch.zeros(2)
    into = {"b": memory, "a": memory, "p": parameter, "v": v}
    found = tensorkeep.load(tmp_path / "c", into=into, select="b")
    assert found["b"] is memory
    assert torch.equal(memory, w)
    memory.fill_(9)
    found = tensorkeep.load(tmp_path / "c", into=into)
    assert torch.equal(memory, w)
    assert found["p"] is parameter
    assert found["v"] is v
    assert torch.equal(parameter.detach(), w + 1)


def test_an_array_neither_matches_a_tensor_nor_shares_its_memory(tmp_path: Path) -> None:
    tensorkeep.save({"t": torch.ones(3), "a": np.zeros(3, np.float32)}, tmp_path / "c")
    memory = torch.full((3,), 9.0)
    with pytest.raises(tensorkeep.StateMismatchError, match="shares memory"):
        tensorkeep.load(tmp_path / "c", into={"t": memory, "a": memory.numpy()})
    with pytest.raises(tensorkeep.StateMismatchError, match=r"tensor float32.*array float32") as caught:
        tensorkeep.load(tmp_path / "c", into={"t": memory, "a": torch.full((3,), 9.0)})
    assert caught.value.different == ("a",)
    assert (memory == 9).all()


def test_views_are_loaded_into_memory_of_their_own(tmp_path: Path) -> None:
    w, qkv = torch.arange(12.0).reshape(3, 4), torch.arange(30.0)
    tensorkeep.save({"w": w, "row": w[1], "t": w.T, "same": w, "qkv": qkv, "k": qkv[10:20]}, tmp_path / "c")
    target = {"w": torch.zeros(4, 3).T, "row": torch.zeros(4), "t": torch.zeros(4, 3), "same": torch.zeros(3, 4)}
    target |= {"qkv": torch.zeros(30), "k": torch.zeros(10)}
    tensorkeep.load(tmp_path / "c", into=target)
    assert same(
        {name: tensor.contiguous() for name, tensor in target.items()},
        {"w": w, "row": w[1].clone(), "t": w.T.contiguous(), "same": w.clone(), "qkv": qkv, "k": qkv[10:20].clone()},
    )
    alone = {"t": torch.zeros(4, 3)}
    tensorkeep.load(tmp_path / "c", into=alone, select="t")
    assert torch.equal(alone["t"], w.T)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"device": "gpu0"}, "gpu0"),
        ({"memory_budget": "many"}, "is not a size"),
        ({"memory_budget": "1kB"}, "too small"),
        ({"device": "cpu", "into": {}}, "exclude each other"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"dtype": torch.int8}, "'int8' is not a floating point dtype of torch"),
        ({"dtype": torch.float16, "into": {}}, "`into` and `dtype` exclude each other"),
        # Numbers and numpy's dtypes are given, too, although 0 is equal to False, and numpy's float64 to None.
        ({"device": 0, "into": {}}, "`into` and `device` exclude each other"),
        ({"dtype": np.dtype("float64"), "into": {}}, "`into` and `dtype` exclude each other"),
        ({"dtype": np.dtype("float64"), "mmap": True}, "`mmap` and `dtype` exclude each other"),
    ]
    + ([] if torch.cuda.is_available() else [({"device": "cuda"}, "cannot be allocated on device 'cuda'")]),
    ids=str,
)
def test_wrong_calls(path: Path, options: Any, expected: str) -> None:
    with pytest.raises(tensorkeep.UsageError, match=expected) as caught:
        tensorkeep.load(path, **options)
    assert caught.value.remedy


def test_a_nul_in_a_path(tmp_path: Path) -> None:
    bad = f"{tmp_path}/a\0b"
    one = (tensorkeep.load, tensorkeep.open, tensorkeep.info, tensorkeep.verify)
    for call in (*one, partial(tensorkeep.save, {}), partial(tensorkeep.convert, bad), partial(tensorkeep.diff, bad)):
        with case(call), pytest.raises(tensorkeep.UsageError, match="NUL"):
            call(bad)


def test_a_structure_that_contradicts_the_tensors_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.arange(6)
    tensorkeep.save({"w": w, "v": w[2:]}, tmp_path / "c")
    # A scalar of a vector, integers with gradients, a view of another kind.
    for name, node in (("w", {"npscalar": "w"}), ("w", {"parameter": "w"}), ("v", {"ndarray": "v"})):

        def hostile(*arguments: Any, name: str = name, node: dict[str, str] = node) -> Any:
            reader = open_reader(*arguments)
            reader.flat.skeleton["dict"][name] = node
            return reader

        monkeypatch.setattr("tensorkeep.checkpoint.loading.open_reader", hostile)
        with case(node), pytest.raises(tensorkeep.CorruptCheckpointError, match="structure"):
            tensorkeep.load(tmp_path / "c")


@pytest.mark.integration
def test_a_state_without_tensors_needs_no_torch(tmp_path: Path) -> None:
    code = """
import sys, numpy as np, tensorkeep
tensorkeep.save({"a": np.ones(3), "n": 1}, sys.argv[1])
target = {"a": np.zeros(3), "n": 0}
tensorkeep.load(sys.argv[1], into=target)
assert target["a"].all() and tensorkeep.load(sys.argv[1])["a"].all()
assert tensorkeep.diff(sys.argv[1], sys.argv[1]).equal
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "c"], check=True)


# Converted dtypes


@pytest.mark.parametrize("dtype", [torch.float32, "float64", torch.float8_e4m3fn])
def test_floating_point_is_converted(path: Path, dtype: Any) -> None:
    saved = tensorkeep.load(path)
    loaded = tensorkeep.load(path, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for name, tensor in saved["model"].items():
        assert same(loaded["model"][name], tensor.to(wanted))
    assert loaded["step"] == 4


def test_only_tensors_of_floating_point_are_converted(tmp_path: Path) -> None:
    state = {"ids": torch.arange(3), "mask": torch.tensor([True]), "complex": torch.ones(1, dtype=torch.complex64)}
    state |= {"array": np.ones(2, np.float32), "scalar": np.float32(1)}
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    tensorkeep.save({**state, "half": half}, tmp_path / "c")
    loaded = tensorkeep.load(tmp_path / "c", dtype=torch.bfloat16)
    assert type(loaded["half"]) is torch.nn.Parameter
    assert loaded.pop("half").dtype is torch.bfloat16
    assert same(loaded, state)


def test_converted_tensors_share_memory_as_the_saved_ones(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    tensorkeep.save({"w": base, "tied": base, "rows": base[2:4], "columns": base[:, 1]}, tmp_path / "c")
    with tensorkeep.open(tmp_path / "c") as checkpoint:
        loaded = checkpoint.load(dtype="bfloat16")
        assert loaded["tied"] is loaded["w"]
        assert loaded["rows"].untyped_storage().data_ptr() == loaded["w"].untyped_storage().data_ptr()
        for name, tensor in (("rows", base[2:4]), ("columns", base[:, 1])):
            assert torch.equal(loaded[name], tensor.bfloat16())
            alone = checkpoint.load(select=name, dtype="bfloat16")[name]
            assert torch.equal(alone, tensor.bfloat16())


def test_tensors_are_converted_within_the_budget(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.ones(18 * 2**20)}, tmp_path / "c")
    with tensorkeep.open(tmp_path / "c", memory_budget="64MiB") as checkpoint:
        loaded = checkpoint.load(dtype=torch.bfloat16)["w"]
        assert bool((loaded == 1).all())
        assert checkpoint._settings.pool.peak_bytes <= 64 * 2**20
