"""The bytes of a leaf: every dtype, layout and range, without a copy of the tensor."""

import tracemalloc
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from state.reloading import leaf_of
from tensorkeep.errors import OutOfMemoryError, UnsupportedError, UnsupportedLeafError, UsageError
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Leaf, allocate
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import leaf_bytes
from tensorkeep.testing.format_suite import NUMPY_DTYPES, TORCH_DTYPES


def stream(leaf: Leaf) -> bytes:
    out = np.full(leaf.nbytes, 0xAA, np.uint8)
    leaf.read(0, leaf.nbytes, out)
    return out.tobytes()


@pytest.mark.parametrize(("kind", "dtypes"), [("tensor", TORCH_DTYPES), ("ndarray", NUMPY_DTYPES)])
def test_dense_memory_is_shared_not_copied(kind: str, dtypes: list[DType]) -> None:
    for dtype, shape in product(dtypes, [(), (0,), (3, 0, 2), (5,), (2, 3)]):
        leaf = leaf_of(allocate(kind, dtype, shape))
        with case(f"{dtype} {shape}"):
            assert (leaf.kind, leaf.dtype, leaf.shape) == (kind, dtype, shape)
            view = leaf.host_bytes()
            assert (view.dtype, view.shape) == (np.uint8, (leaf.nbytes,))
            view[:] = np.arange(leaf.nbytes) % (2 if dtype.kind == "bool" else 256)
            assert stream(leaf) == view.tobytes() == leaf_bytes(leaf.array)


def test_host_bytes_keep_the_memory_of_a_tensor_alive_and_let_it_be_resized() -> None:
    view = leaf_of(torch.arange(100_000.0)).host_bytes()
    others = [torch.zeros(100_000) for _ in range(5)]
    assert np.array_equal(view.view(np.float32), np.arange(100_000.0))
    assert not any(map(torch.any, others))
    tensor = torch.ones(3)
    leaf_of(tensor).host_bytes()
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
def test_lazy_views_are_resolved() -> None:
    for label, make in LAZY.items():
        tensor = make()
        assert tensor.is_conj() or tensor.is_neg()
        leaf, expected = leaf_of(tensor), leaf_of(tensor.resolve_conj().resolve_neg().contiguous())
        with case(label):
            assert leaf.host_bytes() is None
            assert stream(leaf) == stream(expected)
            half = leaf.nbytes // 2
            part = np.empty(half, np.uint8)
            leaf.read(half, leaf.nbytes, part)
            assert part.tobytes() == stream(expected)[half:]
            leaf.write(0, half, part)
            assert stream(leaf)[:half] == part.tobytes()


def test_only_layouts_in_order_have_host_bytes() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for value in (base.T, base[:, ::2], base[:, :3], base[0].expand(3, 6), np.arange(4)[::-1]):
        assert leaf_of(value).host_bytes() is None
    # One element with a stride is in order.
    for value in (base[1:3], base.flatten()[::24], np.arange(4.0)[::4], np.arange(4.0)[2:3][::-1]):
        assert leaf_of(value).host_bytes().tobytes() == leaf_bytes(value)


def test_tensors_that_track_gradients_and_those_of_inference_are_written() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    leaf = leaf_of(weight)
    assert (leaf.kind, leaf.requires_grad) == ("parameter", True)
    leaf.write(0, 24, np.frombuffer(np.arange(6, dtype=np.float32).tobytes(), np.uint8))
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    transposed = leaf_of(weight.T)
    assert transposed.requires_grad
    transposed.write(0, 8, np.frombuffer(np.float32([7, 8]).tobytes(), np.uint8))
    assert weight.tolist() == [[7, 1, 2], [8, 4, 5]]
    with torch.inference_mode():
        tensor = torch.zeros(2, 3).T
    leaf_of(tensor).write(0, 4, np.frombuffer(np.float32(5).tobytes(), np.uint8))
    assert tensor[0, 0] == 5


def test_layouts_that_are_writable_and_memory_that_is_read_only() -> None:
    base = torch.zeros(4, 5)
    assert all(leaf_of(t).writable for t in (base, base.T, base[::2, ::3], base[:0], torch.zeros(()), base[:, :1]))
    assert leaf_of(np.zeros((3, 4))[::-1].T).writable
    assert not leaf_of(base[:1].expand(3, 5)).writable
    assert not leaf_of(base.flatten().as_strided((3, 3), (1, 1))).writable
    assert not leaf_of(np.float32(1)).writable
    array = np.arange(3)
    array.flags.writeable = False
    leaf = leaf_of(array)
    assert stream(leaf) == array.tobytes()
    assert not leaf.writable
    with pytest.raises(UsageError, match="'x': the value cannot be written in place"):
        leaf.write(0, 8, np.zeros(8, np.uint8))


def test_invalid_ranges_are_refused() -> None:
    leaf = leaf_of(torch.zeros(2, 5).T)
    for start, stop, size in ((1, 4, 3), (0, 4, 8), (8, 4, 0), (0, 48, 48), (-4, 0, 4)):
        for function in (leaf.read, leaf.write):
            with case(f"{start} to {stop}"), pytest.raises(ValueError, match="do not fit"):
                function(start, stop, np.empty(size, np.uint8))


def test_misaligned_buffers() -> None:
    tensor = torch.arange(6, dtype=torch.int64).reshape(2, 3).T
    memory = np.zeros(49, np.uint8)
    leaf = leaf_of(tensor)
    leaf.read(0, 48, memory[1:])
    assert memory[1:].tobytes() == leaf_bytes(tensor)
    memory[1:] ^= 0xFF
    leaf.write(0, 48, memory[1:])
    assert memory[1:].tobytes() == leaf_bytes(tensor)
    assert (tensor < 0).all()


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


def test_memory_maps_and_synonyms_of_numpy_are_leaves_and_other_values_are_not(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 2))
    mapped[:] = 3
    leaf = leaf_of(mapped)
    assert type(leaf.array) is np.ndarray
    assert stream(leaf) == np.full((2, 2), 3, np.float32).tobytes()
    for synonym, name in (("longlong", "int64"), ("intp", "int64"), (ml_dtypes.bfloat16, "bfloat16")):
        assert leaf_of(np.zeros(1, synonym)).dtype is BY_NAME[name]
    for value in (1, 1.5, "a", None, [torch.zeros(1)], np.dtype("f4"), torch.Size([1])):
        assert Leaf.of("x", value) is None


class Subclass(torch.Tensor):
    pass


class Matrix(np.ndarray):
    pass


def quietly(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


REFUSED = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "sparse_coo", "to_dense"),
    "quantised": (
        lambda: quietly(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        *("quantised", "int_repr"),
    ),
    "nested": (lambda: quietly(lambda: torch.nested.nested_tensor([torch.ones(1)])), "nested", "unbind"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta device", "assign=True"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "lazy parameter", "run the module once"),
    "subclass": (lambda: torch.zeros(2).as_subclass(Subclass), "subclass Subclass", "dequantize"),
    "parameter of one": (lambda: torch.nn.Parameter(torch.zeros(2).as_subclass(Subclass)), "Subclass", "dequantize"),
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


def test_each_unsupported_array_is_refused_with_its_key_and_a_remedy() -> None:
    for label, (make, message, remedy) in REFUSED.items():
        with case(label):
            with pytest.raises(UnsupportedLeafError) as caught:
                Leaf.of("model.weight", make())
            assert str(caught.value).startswith("key 'model.weight': ")
            assert message in caught.value.message
            assert remedy in (caught.value.remedy or "")


def test_impossible_allocations_are_refused() -> None:
    for kind, library, dtype in (("tensor", "torch", "int4"), ("ndarray", "numpy", "complex32")):
        with pytest.raises(UnsupportedError, match=f"{library} has no dtype {dtype}"):
            allocate(kind, BY_NAME[dtype], (2,))
        with pytest.raises(OutOfMemoryError, match="cannot allocate"):
            allocate(kind, BY_NAME["float32"], (2**30, 2**30))


def test_memory_that_was_freed_or_made_smaller_is_an_error() -> None:
    for transposed, (start, nbytes) in product((False, True), [(0, 0), (0, 100), (1024, 0), (1024, 8000)]):
        flat = torch.arange(2048.0)
        tensor = flat[start : start + 1000].view(10, 100)
        leaf = leaf_of(tensor.T if transposed else tensor)
        stream(leaf)
        flat.untyped_storage().resize_(nbytes)
        for use in (
            leaf.host_bytes,
            lambda leaf=leaf: stream(leaf),
            lambda leaf=leaf: leaf.write(0, 4, np.zeros(4, np.uint8)),
        ):
            with case(f"{nbytes} bytes of {start}"), pytest.raises(UnsupportedLeafError, match="freed or made smaller"):
                use()
