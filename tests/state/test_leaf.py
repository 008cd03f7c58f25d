"""The bytes of a leaf: every dtype, layout and range, without a copy of the tensor."""

import tracemalloc
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tensorkeep.errors import OutOfMemoryError, UnsupportedError, UnsupportedLeafError, UsageError
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.state.strided import Bytes
from tensorkeep.testing.equality import leaf_bytes
from tensorkeep.testing.strategies import NUMPY_DTYPES, TORCH_DTYPES


def leaf_of(value: object) -> Leaf:
    leaf = Leaf.of("x", value)
    assert leaf is not None
    return leaf


def stream(leaf: Leaf) -> bytes:
    out = np.full(leaf.nbytes, 0xAA, np.uint8)
    leaf.read(0, leaf.nbytes, out)
    return out.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("tensor", d) for d in TORCH_DTYPES] + [("ndarray", d) for d in NUMPY_DTYPES], ids=str
)
def test_dense_memory_is_shared_not_copied(kind: str, dtype: Any, shape: tuple[int, ...]) -> None:
    leaf = leaf_of(allocate(kind, dtype, shape))
    assert (leaf.kind, leaf.dtype, leaf.shape) == (kind, dtype, shape)
    view = leaf.host_bytes()
    assert view is not None
    assert view.dtype == np.uint8
    assert view.shape == (leaf.nbytes,)
    view[:] = np.arange(leaf.nbytes) % (2 if dtype.kind == "bool" else 256)
    assert stream(leaf) == view.tobytes() == leaf_bytes(leaf.array)


def memory_of(tensor: torch.Tensor) -> Bytes:
    view = leaf_of(tensor).host_bytes()
    assert view is not None
    return view


def test_host_bytes_keep_the_memory_of_a_tensor_alive() -> None:
    view = memory_of(torch.arange(100_000.0))
    others = [torch.zeros(100_000) for _ in range(5)]
    assert np.array_equal(view.view(np.float32), np.arange(100_000.0))
    assert not any(map(torch.any, others))


def test_tensors_can_be_resized_after_a_call_of_host_bytes() -> None:
    tensor = torch.ones(3)
    memory_of(tensor)
    assert tensor.resize_(1000).numel() == 1000


def test_known_bytes() -> None:
    assert stream(leaf_of(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))) == b"\x80\x3f\x00\x80"
    assert stream(leaf_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).T)) == b"\1\0\3\0\2\0\4\0"
    assert stream(leaf_of(np.int32(-2))) == b"\xfe\xff\xff\xff"
    assert stream(leaf_of(torch.tensor([1 + 2j], dtype=torch.complex64).conj())) == b"\0\0\x80\x3f\0\0\0\xc0"


LAZY = {
    "conjugated": lambda: torch.tensor([[1 + 2j, 3 - 4j], [0j, 1j]]).conj(),
    "conjugated and transposed": lambda: torch.tensor([[1 + 2j, 3 - 4j], [0j, 1j]], dtype=torch.complex128).mH,
    "conjugated halves": lambda: (
        torch.tensor([[0x3C004000, 0x40003C00]] * 2, dtype=torch.int32).view(torch.complex32).conj()
    ),
    "negated": lambda: torch.tensor([[1 + 2j, 3 - 4j]]).conj().imag,
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_lazy_views_are_resolved(make: Any) -> None:
    tensor = make()
    assert tensor.is_conj() or tensor.is_neg()
    leaf = leaf_of(tensor)
    assert leaf.host_bytes() is None
    resolved = tensor.resolve_conj().resolve_neg().contiguous()
    expected = leaf_of(resolved)
    assert stream(leaf) == stream(expected)
    half = leaf.nbytes // 2
    part = np.empty(half, np.uint8)
    leaf.read(half, leaf.nbytes, part)
    assert part.tobytes() == stream(expected)[half:]
    leaf.write(0, half, part)
    assert stream(leaf)[:half] == part.tobytes()


def test_layouts_out_of_order_have_no_host_bytes() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base.T, base[:, ::2], base[:, :3], base[0].expand(3, 6)):
        assert leaf_of(view).host_bytes() is None
    assert leaf_of(np.arange(4)[::-1]).host_bytes() is None
    assert leaf_of(base[1:3]).host_bytes() is not None


def test_one_element_with_a_stride_is_dense() -> None:
    for value in (torch.arange(4.0, dtype=torch.float64)[::4], np.arange(4.0)[::4], np.arange(4.0)[2:3][::-1]):
        leaf = leaf_of(value)
        view = leaf.host_bytes()
        assert view is not None
        assert view.tobytes() == leaf_bytes(value)


def test_tensors_that_track_gradients_are_read_and_written() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    leaf = leaf_of(weight)
    assert (leaf.kind, leaf.requires_grad) == ("parameter", True)
    leaf.write(0, 24, np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), np.uint8))
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    transposed = leaf_of(weight.T)
    assert transposed.requires_grad
    transposed.write(0, 8, np.frombuffer(np.float32([7, 8]).tobytes(), np.uint8))
    assert weight.tolist() == [[7, 1, 2], [8, 4, 5]]


def test_inference_tensors_can_be_written() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2, 3).T
    leaf = leaf_of(tensor)
    leaf.write(0, 4, np.frombuffer(np.float32(5).tobytes(), np.uint8))
    assert tensor[0, 0] == 5


def test_read_only_arrays_are_read_but_not_written() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    leaf = leaf_of(array)
    assert stream(leaf) == array.tobytes()
    assert not leaf.writable
    with pytest.raises(UsageError, match="'x': the value cannot be written in place"):
        leaf.write(0, 8, np.zeros(8, np.uint8))


def test_writable_layouts() -> None:
    base = torch.zeros(4, 5)
    assert all(leaf_of(t).writable for t in (base, base.T, base[::2, ::3], base[:0], torch.zeros(()), base[:, :1]))
    assert leaf_of(np.zeros((3, 4))[::-1].T).writable
    assert not leaf_of(base[:1].expand(3, 5)).writable
    assert not leaf_of(base.flatten().as_strided((3, 3), (1, 1))).writable
    assert not leaf_of(np.float32(1)).writable


@pytest.mark.parametrize(("start", "stop", "size"), [(1, 4, 3), (0, 4, 8), (8, 4, 0), (0, 48, 48), (-4, 0, 4)])
def test_invalid_ranges_are_refused(start: int, stop: int, size: int) -> None:
    leaf = leaf_of(torch.zeros(2, 5).T)
    with pytest.raises(ValueError, match="do not fit"):
        leaf.read(start, stop, np.empty(size, np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        leaf.write(start, stop, np.empty(size, np.uint8))


def test_misaligned_buffers() -> None:
    tensor = torch.arange(6, dtype=torch.int64).reshape(2, 3).T
    memory = np.zeros(49, np.uint8)
    leaf = leaf_of(tensor)
    leaf.read(0, 48, memory[1:])
    assert memory[1:].tobytes() == leaf_bytes(tensor)
    leaf.write(0, 48, memory[1:][::-1].copy()[::-1].copy())
    assert memory[1:].tobytes() == leaf_bytes(tensor)


def test_reading_a_transposed_array_takes_memory_of_the_range() -> None:
    array = np.zeros((2048, 2048), np.float32).T
    leaf = leaf_of(array)
    out = np.empty(64 * 1024, np.uint8)
    tracemalloc.start()
    try:
        leaf.read(1_000_000, 1_000_000 + len(out), out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(out)
    assert leaf.nbytes == 256 * len(out)


def test_reading_a_transposed_tensor_copies_only_pieces_of_the_range() -> None:
    leaf = leaf_of(torch.zeros(300, 200).T)
    data = np.empty(4 * 800, np.uint8)
    pieces = list(leaf._pieces(4 * 450, 4 * 1250, data))
    assert [(tuple(piece.shape), part.ctypes.data - data.ctypes.data, part.size) for piece, part in pieces] == [
        ((150,), 0, 600),
        ((2, 300), 600, 2400),
        ((50,), 3000, 200),
    ]


def test_memory_maps_are_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 2))
    mapped[:] = 3
    leaf = leaf_of(mapped)
    assert type(leaf.array) is np.ndarray
    assert stream(leaf) == np.full((2, 2), 3, np.float32).tobytes()


def test_other_values_are_not_leaves() -> None:
    assert [
        Leaf.of("x", value) for value in (1, 1.5, "a", None, [torch.zeros(1)], np.dtype("f4"), torch.Size([1]))
    ] == [None] * 7


class Subclass(torch.Tensor):
    pass


class Matrix(np.ndarray):
    pass


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


REFUSED = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse_coo", "to_dense"),
    "quantised": (quantised, "quantised", "int_repr"),
    "nested": (nested, "nested", "unbind"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta device", "to_empty"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "lazy parameter", "run the module once"),
    "subclass": (lambda: torch.zeros(2).as_subclass(Subclass), "subclass Subclass", "dequantize"),
    "parameter of a subclass": (
        lambda: torch.nn.Parameter(torch.zeros(2).as_subclass(Subclass)),
        "subclass Subclass",
        "dequantize",
    ),
    "ndarray subclass": (lambda: np.zeros(2).view(Matrix), "Matrix is a subclass", "np.asarray"),
    "masked": (lambda: np.ma.masked_array([1, 2], [0, 1]), "MaskedArray", "mask"),
    "object": (lambda: np.array([None, {}]), "numpy dtype object", "tolist"),
    "string": (lambda: np.array(["a", "bc"]), "numpy dtype <U2", "tolist"),
    "string scalar": (lambda: np.str_("a"), "numpy dtype <U1", "tolist"),
    "structured": (lambda: np.zeros(2, [("a", "f4")]), "numpy dtype", "each field"),
    "datetime": (lambda: np.array(["2020-01-01"], "M8[D]"), "datetime64", "int64"),
    "big-endian": (lambda: np.zeros(2, ">f4"), "numpy dtype >f4", "newbyteorder"),
    "long double": (lambda: np.zeros(2, np.longdouble), "numpy dtype", "convert it"),
    "bits": (lambda: np.zeros(2, "V3"), "numpy dtype", "convert it"),
}


@pytest.mark.parametrize(("make", "message", "remedy"), REFUSED.values(), ids=REFUSED)
def test_each_unsupported_array_is_refused_with_its_key_and_a_remedy(make: Any, message: str, remedy: str) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        Leaf.of("model.weight", make())
    assert str(caught.value).startswith("key 'model.weight': ")
    assert message in caught.value.message
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy


def test_numpy_synonyms_have_the_same_dtype() -> None:
    assert leaf_of(np.zeros(1, "longlong")).dtype is BY_NAME["int64"]
    assert leaf_of(np.zeros(1, "intp")).dtype is BY_NAME["int64"]
    assert leaf_of(np.zeros(1, ml_dtypes.bfloat16)).dtype is BY_NAME["bfloat16"]


def test_impossible_allocations_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="torch has no dtype int4"):
        allocate("tensor", BY_NAME["int4"], (2,))
    with pytest.raises(UnsupportedError, match="numpy has no dtype complex32"):
        allocate("ndarray", BY_NAME["complex32"], (2,))
    for kind in ("tensor", "ndarray"):
        with pytest.raises(OutOfMemoryError, match="cannot allocate"):
            allocate(kind, BY_NAME["float32"], (2**30, 2**30))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("start", "nbytes"), [(0, 0), (0, 100), (1024, 0), (1024, 8000)])
def test_memory_that_was_freed_or_made_smaller_is_an_error(start: int, nbytes: int, transposed: bool) -> None:
    flat = torch.arange(2048.0)
    tensor = flat[start : start + 1000].view(10, 100)
    leaf = leaf_of(tensor.T if transposed else tensor)
    stream(leaf)
    flat.untyped_storage().resize_(nbytes)
    with pytest.raises(UnsupportedLeafError, match="freed or made smaller"):
        leaf.host_bytes()
    with pytest.raises(UnsupportedLeafError, match="freed or made smaller"):
        stream(leaf)
    with pytest.raises(UnsupportedLeafError, match="freed or made smaller"):
        leaf.write(0, leaf.nbytes, np.zeros(leaf.nbytes, np.uint8))
