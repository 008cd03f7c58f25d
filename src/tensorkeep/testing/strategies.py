"""Hypothesis strategies for dtypes, shapes, unusual tensors and arrays, and nested states."""

import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import torch
from hypothesis import example
from hypothesis import strategies as st

from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Leaf, LeafKind, allocate

Point = namedtuple("Point", ["x", "y"])

TORCH_DTYPES = [dtype for dtype in BY_NAME.values() if dtype.has_torch]
NUMPY_DTYPES = [dtype for dtype in BY_NAME.values() if dtype.has_numpy]

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
"""Shapes with 0-d, empty and length-1 dimensions."""


@st.composite
def _filled(draw: st.DrawFn, kind: LeafKind, dtype: DType, shape: tuple[int, ...]) -> Any:
    """Dense arrays of random bits, which include NaN payloads and denormals."""
    array = allocate(kind, dtype, shape)
    leaf = Leaf.of("x", array)
    assert leaf is not None
    seed = draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).integers(0, 256, leaf.nbytes, np.uint8)
    if dtype.kind == "bool":
        bits &= 1
    elif dtype.itemsize == 1 and dtype.kind in ("int", "uint") and not dtype.has_torch:
        # int2 and int4 take a byte each in ml_dtypes; the upper bits must repeat the sign.
        width = int(dtype.name[-1])
        bits &= (1 << width) - 1
        if dtype.kind == "int":
            bits[bits >= 1 << (width - 1)] |= 256 - (1 << width)
    elif dtype.name.startswith(("float4_e2m1fn", "float6")) and not dtype.has_torch:
        bits &= (1 << int(dtype.name[5])) - 1
    leaf.write(0, leaf.nbytes, bits)
    return array


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[DType] | None = None) -> torch.Tensor:
    """Tensors of every dtype and layout: transposed, sliced with steps, expanded, conjugated, tracking gradients."""
    dtype = draw(st.sampled_from(dtypes or TORCH_DTYPES))
    shape = draw(shapes)
    tensor: torch.Tensor = draw(_filled("tensor", dtype, shape))
    for dimension, length in enumerate(tensor.shape):
        change = draw(st.sampled_from(["none", "none", "step", "narrow", "expand"]))
        if change == "step":
            tensor = tensor[(slice(None),) * dimension + (slice(None, None, 2),)]
        elif change == "narrow" and length > 1:
            tensor = tensor.narrow(dimension, 1, length - 1)
        elif change == "expand" and length == 1:
            tensor = tensor.expand(*tensor.shape[:dimension], 3, *tensor.shape[dimension + 1 :])
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if dtype.name in ("complex64", "complex128") and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.kind in ("float", "complex") and draw(st.integers(0, 4)) == 0:
        tensor = tensor.detach().requires_grad_()
    return tensor


@st.composite
def arrays(draw: st.DrawFn, dtypes: list[DType] | None = None) -> Any:
    """Numpy arrays of every dtype and layout: transposed, reversed, sliced with steps, broadcast, read-only."""
    dtype = draw(st.sampled_from(dtypes or NUMPY_DTYPES))
    array = draw(_filled("ndarray", dtype, draw(shapes)))
    for dimension in range(array.ndim):
        step = draw(st.sampled_from([1, 1, 2, -1, -2]))
        array = array[(slice(None),) * dimension + (slice(None, None, step),)]
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.integers(0, 4)) == 0:
        array = np.broadcast_to(array, (2, *array.shape))
    return array


numpy_scalars = st.sampled_from(NUMPY_DTYPES).flatmap(lambda dtype: _filled("npscalar", dtype, ())).map(lambda a: a[()])

parameters = (
    tensors([dtype for dtype in TORCH_DTYPES if dtype.kind in ("float", "complex")])
    .filter(lambda tensor: not tensor.is_conj())
    .flatmap(lambda tensor: st.booleans().map(lambda grad: torch.nn.Parameter(tensor.detach(), requires_grad=grad)))
)

leaves = tensors() | arrays() | numpy_scalars | parameters
"""All values that become leaves."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["", ".", "a.b", "a", "b", "1", "True", "__metadata__", "a%2Eb", "%", "weight", "model", "a/b", "\0"]
)

floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]) | st.floats()
"""Floats with any bit pattern."""

keys = (
    texts
    | st.integers()
    | st.booleans()
    | st.none()
    | floats.map(lambda value: math.nan if math.isnan(value) else value)
)

plain_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | floats
    | st.builds(complex, floats, floats)
    | texts
    | st.binary(max_size=8)
    | st.binary(max_size=8).map(bytearray)
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 9) | st.integers(-9, -1))
    | st.frozensets(keys, max_size=3)
    | st.sets(keys, max_size=3)
    | st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size)
    | st.sampled_from([torch.bfloat16, torch.int64, torch.device("cpu"), torch.device("cuda:1")])
)
"""All plain values that a state can contain."""


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(values, max_size=4)
        | st.lists(values, max_size=4).map(tuple)
        | st.dictionaries(keys, values, max_size=4)
        | st.dictionaries(texts, values, max_size=4).map(OrderedDict)
        | st.builds(Point, values, values)
    )


states = st.recursive(plain_values | leaves, _containers, max_leaves=12)
"""Nested states of all values that can be saved without registering a class."""

_NAN = float("nan")
_odd_keys = st.sampled_from(
    [_NAN, -_NAN, math.nan, -0.0, 0, False, 1, True, 1.0, "1", "True", None, "None", "", ".", "%", "%rnan", "nan", b"1"]
    + [(1, 2), frozenset(), 1j, math.inf, 2**64, -(2**70), "a" * 10_000, "a\0", "\ud800", "__metadata__", torch.int8]
)
_odd_values = st.sampled_from([0, 1, 32, 33, 64, 65, 70]).map(lambda count: torch.ones((1,) * count)) | st.sampled_from(
    [np.ones((1,) * 64), np.ones((0, 2**50)), torch.ones(0, 2**40), np.float32(3), 10**400, _NAN, "\ud800", b"\0"]
)
odd_states = st.recursive(_odd_values, lambda inner: st.dictionaries(_odd_keys, inner, max_size=4), max_leaves=6)
"""States that a save must keep exactly or refuse: keys that look alike or differ from themselves, and shapes with more
dimensions or longer ones than libraries support."""

_ODDEST: list[dict[str, Any]] = [
    {"model": {_NAN: torch.ones(2), -_NAN: torch.ones(3)}},
    {"a": torch.ones((1,) * 65)},
    {"a": torch.ones(0, 2**62)},
    # Names of files of other formats.
    {"model.safetensors": torch.ones(2)},
    {"pytorch_model.bin.index.json": torch.ones(2), "a": {"x.tensorkeep": 1}},
]


def with_odd_examples(test: Any) -> Any:
    """Add some of the oddest states as examples to a property test of `odd_states`."""
    for state in _ODDEST:
        test = example(state)(test)
    return test
