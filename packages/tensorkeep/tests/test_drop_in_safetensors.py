"""``tensorkeep.safetensors`` has the names, results and errors of safetensors."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import tensorkeep
import tensorkeep.safetensors as ours
import tensorkeep.safetensors.numpy as ours_numpy
import tensorkeep.safetensors.torch as ours_torch
from tensorkeep.testing.equality import same

TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3),
    "a": torch.arange(4, dtype=torch.int64),
    "half": torch.ones(2, 2).bfloat16(),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(7.5),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ours.save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt", "step": "7"})
    return tmp_path / "a.safetensors"


def by_name(tensors: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether both have the same tensors, in any order."""
    return same(dict(sorted(tensors.items())), dict(sorted(expected.items())))


class Tied(torch.nn.Module):
    def __init__(self, value: float = 0.0, *, tied: bool = True) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.last = self.first if tied else torch.nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_every_function_takes_their_arguments(module: str) -> None:
    theirs = {"torch": safetensors.torch, "numpy": safetensors.numpy}[module]
    mine = {"torch": ours_torch, "numpy": ours_numpy}[module]
    for name in mine.__all__:
        expected = inspect.signature(getattr(theirs, name)).parameters
        assert list(inspect.signature(getattr(mine, name)).parameters)[: len(expected)] == list(expected)


def test_metadata_is_stored_as_given(path: Path) -> None:
    for metadata in ({"format": "pt", "step": "7"}, None):
        ours.save_file(TENSORS, path, metadata)
        for opening in (ours.safe_open, safetensors.safe_open):
            with opening(path, framework="pt") as file:
                assert file.metadata() == metadata


def test_bytes_are_those_of_safetensors() -> None:
    assert ours.save(TENSORS, {"a": "b"}) == safetensors.torch.save(TENSORS, {"a": "b"})
    assert by_name(ours.load(ours.save(TENSORS)), TENSORS)
    assert same(ours.load(ours.save({"t": TENSORS["b"].t()}))["t"], TENSORS["b"].t().contiguous())
    assert ours.load(ours.save({"t": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}))["t"].ndim == 0
    with pytest.raises(ours.SafetensorError, match="the bytes are not a safetensors file"):
        ours.load(b"nothing")


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_safe_open_reads_as_theirs(path: Path, framework: str) -> None:
    with ours.safe_open(path, framework) as file, safetensors.safe_open(path, framework) as expected:
        assert (file.keys(), file.offset_keys()) == (list(expected.keys()), list(expected.offset_keys()))
        assert by_name(file.get_tensors(), {name: expected.get_tensor(name) for name in TENSORS})
        for name in TENSORS:
            assert same(file.get_tensor(name), expected.get_tensor(name))
            mine, theirs = file.get_slice(name), expected.get_slice(name)
            assert (mine.get_shape(), mine.get_dtype()) == (list(theirs.get_shape()), theirs.get_dtype())
        for index in (slice(1, None), (slice(None), 1), (0, slice(0, 2)), (slice(1, 2), -1), ...):
            assert same(np.asarray(file.get_slice("b")[index]), np.asarray(expected.get_slice("b")[index]))


def test_safe_open_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    ours.save_file({"w": torch.ones(4, 2**20)}, tmp_path / "a.safetensors")
    with ours.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.get_slice("w")[1].sum() == 2**20
        assert file._checkpoint._settings.pool.peak_bytes < 5 * 2**20


def test_nested_states_are_read_by_their_names(tmp_path: Path) -> None:
    tensorkeep.save({"model": {"w": torch.ones(2), "a": np.arange(2)}, "n": 3}, tmp_path / "a.safetensors")
    assert by_name(ours.load_file(tmp_path / "a.safetensors"), {"model.a": torch.arange(2), "model.w": torch.ones(2)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: ours.safe_open(path, "tf"), "the framework 'tf' is not supported"),
        (lambda path: ours.safe_open(path, "pt", backend="fast"), "the backend 'fast' does not exist"),
        (lambda path: ours.safe_open(path, "pt", device="gpu0"), "gpu0"),
        (lambda path: ours.safe_open(path, "pt").get_tensor("bb"), "has no tensor 'bb'\ndid you mean 'b'?"),
        (lambda path: ours.safe_open(path, "pt").get_slice("b")[5], "index 5 is out of range"),
        (lambda path: ours.load_file(path.parent / "damaged.safetensors"), "too short to be a safetensors file"),
        (lambda path: ours.save_file([1], path), "a list is not a dict of tensors"),
        (lambda path: ours.save_file({"a": {"b": torch.ones(1)}}, path), "a dict at 'a' is not a Tensor with a name"),
        (lambda path: ours.save_file({"a": TENSORS["b"], "b": TENSORS["b"][:1]}, path), "shares memory with 'a'"),
        (lambda path: ours.save({"a": TENSORS["b"], "b": TENSORS["b"]}), "shares memory with 'a'"),
        (lambda path: ours.save_file(TENSORS, path, {"a": 1}), "maps strings to strings"),
        (lambda path: ours_numpy.save_file({"a": torch.ones(1)}, path), "a Tensor at 'a' is not a ndarray"),
    ],
)
def test_errors_are_theirs_and_ours(path: Path, call: Any, message: str) -> None:
    before = path.read_bytes()
    (path.parent / "damaged.safetensors").write_bytes(b"abc")
    with pytest.raises(ours.SafetensorError) as caught:
        call(path)
    assert isinstance(caught.value, tensorkeep.TensorkeepError)
    assert message in str(caught.value)
    assert path.read_bytes() == before


def test_closed_and_missing_files_are_errors_that_name_the_file(path: Path) -> None:
    with ours.safe_open(path, "pt") as file:
        part = file.get_slice("b")
    for call in (file.keys, file.metadata, file.offset_keys, file.get_tensors, lambda: part[0]):
        with pytest.raises(ours.SafetensorError, match="is closed"):
            call()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ours.load_file(path.with_name("nothing"))
    with pytest.raises(ours.SafetensorError) as caught:
        ours.save_file(TENSORS, path.with_name("model.bin"), {"a": 1})  # type: ignore[dict-item]
    assert caught.value.path == str(path.with_name("model.bin"))


def test_arrays_of_any_byte_order_and_sharing_are_stored(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    ours_numpy.save_file({"a": array, "b": array, "t": array.T}, tmp_path / "a.safetensors")
    expected = {"a": array.astype("i4"), "b": array.astype("i4"), "t": array.T.astype("i4", order="C")}
    assert by_name(safetensors.numpy.load_file(tmp_path / "a.safetensors"), expected)
    assert by_name(ours_numpy.load_file(tmp_path / "a.safetensors"), expected)
    assert by_name(ours_numpy.load(ours_numpy.save({"a": array, "b": array})), {"a": expected["a"], "b": expected["b"]})


def test_models_are_exchanged_with_safetensors(tmp_path: Path) -> None:
    path = str(tmp_path / "m.safetensors")
    for save, load in (
        (ours.save_model, safetensors.torch.load_model),
        (safetensors.torch.save_model, ours.load_model),
        (ours.save_model, ours.load_model),
    ):
        save(Tied(1.0), path, metadata={"who": "me"})
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"last.weight": "first.weight", "last.bias": "first.bias", "who": "me"}
        model = Tied()
        assert [list(names) for names in load(model, path)] == [[], []]
        assert bool((model.last.weight == 1).all())
    # Whichever of the tied names is stored is loaded.
    state, model = Tied(1.0).state_dict(), Tied()
    ours.save_file({name: state[name] for name in ("last.weight", "last.bias")}, path)
    assert ours.load_model(model, path) == ([], [])
    assert bool((model.first.weight == 1).all())


def test_a_model_of_other_names_is_refused_before_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    ours.save_model(Tied(1.0), path)
    model = Tied(tied=False)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "last.bias", "last.weight"') as caught:
        ours.load_model(model, path)
    assert isinstance(caught.value, tensorkeep.StateMismatchError)
    assert not model.first.weight.any()
    assert ours.load_model(model, path, strict=False) == (["last.bias", "last.weight"], [])
    assert bool((model.first.weight == 1).all())
    ours.save_model(model, path)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "last.bias", "last.weight"'):
        ours.load_model(Tied(), path)


def test_a_model_that_is_not_contiguous(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    model.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    with pytest.raises(ValueError, match=r"use save_model\(..., force_contiguous=True\)"):
        ours.save_model(model, tmp_path / "m.safetensors", force_contiguous=False)
    ours.save_model(model, tmp_path / "m.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "m.safetensors")["weight"], model.weight)


@pytest.mark.integration  # transformers opens a socket when it is imported
@pytest.mark.xdist_group("transformers")
def test_transformers_saves_and_loads_through_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, modeling_utils

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    saved: list[Any] = []

    def save_file(*arguments: Any, **options: Any) -> None:
        saved.append(options["metadata"])
        ours.save_file(*arguments, **options)

    monkeypatch.setattr(modeling_utils, "safe_save_file", save_file)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="4kB")
    model.save_pretrained(tmp_path / "single")
    assert len(saved) > 2 and saved[0] == {"format": "pt"}
    for folder in ("sharded", "single"):
        theirs = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        with monkeypatch.context() as patch:
            patch.setattr(modeling_utils, "safe_open", ours.safe_open)
            mine = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        for loaded in (theirs, mine):
            assert same(dict(loaded.state_dict()), dict(model.state_dict()))
