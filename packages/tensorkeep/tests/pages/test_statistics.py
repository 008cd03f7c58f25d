"""TensorStatistics of tensors of every dtype, compared with numpy's in float64."""

import math
import random

import numpy as np
import numpy.typing as npt
import pytest

from tensorkeep.pages.statistics import Accumulator, TensorStatistics
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Bytes

FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
WIDE = {"float32", "float64", "complex64", "complex128"}


def measured(data: Bytes, dtype: DType, step: int | None = None) -> TensorStatistics:
    """Return the statistics of bytes that are added in ranges, in any order."""
    found = Accumulator(dtype)
    starts = list(range(0, len(data), step or max(len(data), 1)))
    random.Random(0).shuffle(starts)
    for start in starts:
        found.add(data[start : start + step] if step else data)
    return found.result()


def numbers(data: Bytes, dtype: DType) -> npt.NDArray[np.float64]:
    """Return the numbers of elements in float64, decoded in another way than by the code under test."""
    if dtype.name == "float4_e2m1fn_x2":
        return np.array([FLOAT4[half] for byte in data.tolist() for half in (byte & 15, byte >> 4)])
    if dtype.kind == "complex":
        width = dtype.itemsize // 2
        return data.view(f"f{width}").astype(np.float64)
    if dtype.kind == "bool":
        return (data != 0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return data.view(dtype.numpy).astype(np.float64)


def some_bytes(dtype: DType, count: int) -> Bytes:
    """Return bytes of elements: every pattern of narrow dtypes, of wide ones numbers of all sizes and special ones."""
    generator = np.random.default_rng(7)
    if dtype.name not in WIDE:
        whole = np.arange(65536, dtype=np.uint16).view(np.uint8)
        more = generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        data = np.concatenate((whole[: 65536 * 2], more))
        return data[: len(data) // dtype.itemsize * dtype.itemsize]
    values = generator.normal(size=count * 2) * 10.0 ** generator.integers(-6, 7, count * 2)
    values[:9] = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, math.nan, 3e38, -3e38]
    width = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
    return values.astype(f"f{width}").view(np.uint8)


@pytest.mark.parametrize("name", BY_NAME)
def test_statistics_are_those_of_numpy(name: str) -> None:
    dtype = BY_NAME[name]
    whole = some_bytes(dtype, 3000)
    for data, step in ((whole, None), (whole, 4096), (whole[: 64 * dtype.itemsize], 16)):
        found = measured(data, dtype, step)
        expected = numbers(data, dtype)
        finite = expected[np.isfinite(expected)]
        counts = (len(expected), np.isnan(expected).sum(), np.isinf(expected).sum(), (expected == 0).sum())
        assert (found.numbers, found.nan, found.infinite, found.zeros) == counts, step
        assert (found.least, found.largest) == (finite.min(), finite.max()), step
        assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9 * np.abs(finite).max()), step
        assert found.std == pytest.approx(finite.std(), rel=1e-9), step
        if found.least != found.largest:
            assert found.histogram is not None
            total = sum(found.histogram.counts) + found.histogram.beyond
            # Each count is rounded up.
            assert len(finite) <= total <= len(finite) + len(found.histogram.counts) + 1, step


def test_integers_beyond_float64_keep_their_digits_and_numbers_beyond_float32_are_in_the_range() -> None:
    for name in ("int64", "uint64"):
        found = measured(np.array([2**53 + 1, 5, 2**62 + 3], name).view(np.uint8), BY_NAME[name])
        assert (found.least, found.largest) == (5, 2**62 + 3), name
    values = np.array([1e300, -1e300, 1.0, 2.0])
    found = measured(values.view(np.uint8), BY_NAME["float64"])
    assert (found.least, found.largest, found.infinite) == (-1e300, 1e300, 0)
    found = measured(values[:2].view(np.uint8), BY_NAME["float64"])
    assert (found.least, found.largest, found.histogram) == (-1e300, 1e300, None)


def test_the_largest_number_is_in_the_last_bar() -> None:
    for largest in (0.1, 0.3, 1 / 3, 0.7, 1e-7):
        found = measured(np.array([-0.2, 0.01, largest]).view(np.uint8), BY_NAME["float64"]).histogram
        assert found is not None, largest
        assert (found.counts[0] >= 1, found.counts[-1] >= 1, found.beyond) == (True, True, 0), largest


def test_threads_and_order_do_not_change_a_bit() -> None:
    data = np.random.default_rng(1).normal(3.0, 1e-3, 400_000).astype(np.float32).view(np.uint8)
    one, other = Accumulator(BY_NAME["float32"]), Accumulator(BY_NAME["float32"])
    starts = range(0, len(data), 100_000)
    for found, order in ((one, starts), (other, reversed(starts))):
        for start in order:
            found.add(data[start : start + 100_000])
    assert one.result() == other.result()
    # The sum of squares would lose all digits.
    assert one.result().std == pytest.approx(data.view(np.float32).astype(np.float64).std(), rel=1e-9)


def test_an_empty_tensor_has_no_numbers_and_one_without_a_finite_number_no_range() -> None:
    for name, dtype in BY_NAME.items():
        assert Accumulator(dtype).result() == TensorStatistics(), name
        assert measured(np.zeros(0, np.uint8), dtype) == TensorStatistics(), name
    for name in ("float32", "bfloat16", "float8_e5m2", "float64"):
        values = np.array([math.nan, math.inf, -math.inf, math.nan]).astype(BY_NAME[name].numpy)
        found = measured(values.view(np.uint8), BY_NAME[name])
        assert found == TensorStatistics(numbers=4, nan=2, infinite=2), name


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_histogram_of_weights_is_that_of_numpy(name: str) -> None:
    dtype = BY_NAME[name]
    values = np.random.default_rng(2).normal(0, 0.02, 300_000).astype(dtype.numpy)
    values[:5] = 40.0  # far outside, and not to make all bars but one empty
    found = measured(values.view(np.uint8), dtype).histogram
    assert found is not None and not found.log
    assert -0.12 < found.low < -0.06 < 0.06 < found.high < 0.12
    assert 5 <= found.beyond < 1000
    exact, _ = np.histogram(values.astype(np.float64), bins=len(found.counts), range=(found.low, found.high))
    # A code is spread over its interval: the counts of neighbouring bins are exchanged at their border.
    assert np.abs(np.array(found.counts) - exact).max() < 0.1 * exact.max()


def test_positive_numbers_of_many_sizes_have_a_logarithmic_histogram() -> None:
    values = 10.0 ** np.random.default_rng(3).uniform(-12, -3, 100_000)
    values[:200] = 0
    found = measured(values.astype(np.float32).view(np.uint8), BY_NAME["float32"]).histogram
    assert found is not None and found.log
    assert found.low < 1e-11 and found.high == pytest.approx(1e-3, rel=0.01)
    assert 200 <= found.beyond < 500
    assert min(found.counts) > 0.5 * max(found.counts)


def test_few_integers_have_a_bar_each_and_one_value_has_no_histogram() -> None:
    for name, bars in {"bool": 2, "uint8": 4, "int32": 4}.items():
        values = np.arange(4000) % bars
        found = measured(values.astype(BY_NAME[name].numpy).view(np.uint8), BY_NAME[name]).histogram
        assert found is not None, name
        assert found.counts == [4000 // bars] * bars, name
    one = measured(np.full(9, 1.5, np.float32).view(np.uint8), BY_NAME["float32"])
    assert (one.least, one.largest, one.std, one.histogram) == (1.5, 1.5, 0.0, None)
