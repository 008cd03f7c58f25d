"""The conformance suite of formats: tests that every format must pass.

Subclass it in your tests, with the format and its capabilities; pytest then runs all tests on it::

    class TestMyFormat(FormatSuite):
        format = my_package.my_format.FORMAT
        keeps_metadata = False
"""

import errno
import math
import os
import struct
import tempfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tensorkeep.errors import DestinationExistsError, StoreError, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.formats.base import (
    BLOCK_BYTES,
    FORMATS,
    Format,
    OpenSettings,
    Problem,
    Reader,
    WriteResult,
    WriteSettings,
    check_saveable,
)
from tensorkeep.state.aliases import make_view
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import Bytes, Leaf, LeafKind, allocate
from tensorkeep.state.tree import flatten, leaf_specs, unflatten
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference, same

# Contents of files and folders, and a system call that runs out of space.


def content(path: Path) -> dict[str, bytes]:
    """Return the contents of all files at or below a path, by name."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in sorted(files)}


def names_in(folder: Path) -> list[str]:
    """Return the names of all entries of a folder, hidden and temporary ones included."""
    return sorted(entry.name for entry in folder.iterdir())


class FailingDisk:
    """A system call that counts its calls and raises ENOSPC from a chosen call on."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.calls = 0
        self._call = call
        self._fatal: int | None = None

    def fail_at(self, number: int) -> None:
        self.calls, self._fatal = 0, number

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self._fatal is not None and self.calls >= self._fatal:
            # From the chosen call on: a full disk stays full.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._call(*args)


# Hypothesis strategies for dtypes, shapes, unusual tensors and arrays, and nested states.

Point = namedtuple("Point", ["x", "y"])
TORCH_DTYPES = [dtype for dtype in BY_NAME.values() if dtype.has_torch]
NUMPY_DTYPES = [dtype for dtype in BY_NAME.values() if dtype.has_numpy]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def _filled(draw: st.DrawFn, kind: LeafKind, dtype: DType, shape: tuple[int, ...]) -> Any:
    array = allocate(kind, dtype, shape)
    leaf = Leaf.of("x", array)
    assert leaf is not None
    # Random bits include NaN payloads and denormals. A seed is far cheaper to draw than bytes.
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
# All values that become leaves.
leaves = tensors() | arrays() | numpy_scalars | parameters
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["", ".", "a.b", "a", "b", "1", "True", "__metadata__", "a%2Eb", "%", "weight", "model", "a/b", "\0"]
)
# Floats with any bit pattern.
floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]) | st.floats()
keys = (
    texts
    | st.integers()
    | st.booleans()
    | st.none()
    | floats.map(lambda value: math.nan if math.isnan(value) else value)
)
# All plain values that a state can contain.
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


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(values, max_size=4)
        | st.lists(values, max_size=4).map(tuple)
        | st.dictionaries(keys, values, max_size=4)
        | st.dictionaries(texts, values, max_size=4).map(OrderedDict)
        | st.builds(Point, values, values)
    )


# Nested states of all values that can be saved without registering a class.
states = st.recursive(plain_values | leaves, _containers, max_leaves=12)
_NAN = float("nan")
_odd_keys = st.sampled_from(
    [_NAN, -_NAN, math.nan, -0.0, 0, False, 1, True, 1.0, "1", "True", None, "None", "", ".", "%", "%rnan", "nan", b"1"]
    + [(1, 2), frozenset(), 1j, math.inf, 2**64, -(2**70), "a" * 10_000, "a\0", "\ud800", "__metadata__", torch.int8]
)
_odd_values = st.sampled_from([0, 1, 32, 33, 64, 65, 70]).map(lambda count: torch.ones((1,) * count)) | st.sampled_from(
    [np.ones((1,) * 64), np.ones((0, 2**50)), torch.ones(0, 2**40), np.float32(3), 10**400, _NAN, "\ud800", b"\0"]
)
# States that a save must keep exactly or refuse: keys that look alike or differ from themselves, and shapes with more
# dimensions or longer ones than libraries support.
odd_states = st.recursive(_odd_values, lambda inner: st.dictionaries(_odd_keys, inner, max_size=4), max_leaves=6)
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


# The states that the conformance suite of formats saves, and `load`, which uses the contract of `Reader` only.


def noise(dtype_name: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits, which include NaN payloads and denormals."""
    dtype = BY_NAME[dtype_name]
    tensor: torch.Tensor = allocate("tensor", dtype, shape)
    leaf = Leaf.of("x", tensor)
    assert leaf is not None
    bits: Bytes = np.random.default_rng(seed).integers(0, 256, leaf.nbytes, np.uint8)
    leaf.write(0, leaf.nbytes, np.minimum(bits, 1) if dtype.kind == "bool" else bits)
    return tensor


def training_state() -> dict[str, Any]:
    """Return a small training state: tied weights, parameters, an optimizer's nested state, plain values."""
    weight = noise("bfloat16", 40, 30)
    return {
        "model": OrderedDict(embed=weight, head=weight, bias=noise("float32", 7), half=weight[:20], turned=weight.t()),
        "optimizer": {
            "state": {
                0: {"step": torch.tensor(7.0), "exp_avg": noise("float32", 40, 30, seed=1)},
                1: {"step": torch.tensor(8.0), "exp_avg": noise("float32", 7, seed=2)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "parameter": torch.nn.Parameter(torch.linspace(0, 1, 5)),
        "step": 2**70,
        "losses": [float("nan"), -0.0, float("inf")],
    }


STATES: dict[str, Callable[[], Any]] = {
    "flat": lambda: {"z": noise("float32", 3, 4), "a": noise("uint8", 5), "m": noise("float64", 2)},
    "training": training_state,
    "empty": dict,
    "no tensor": lambda: {"step": 3},
    "bare tensor": lambda: noise("float16", 4, 5),
    "list": lambda: [noise("int32", 2), (noise("int64", 1), "text"), b"\0\xff"],
    "shapes": lambda: {"0-d": noise("int64"), "none": noise("float32", 0, 3), "one": noise("int16", 1, 1, 1)},
    "layouts": lambda: {
        "transposed": noise("float32", 6, 4).t(),
        "strided": noise("float64", 9, 8)[::2, 1::3],
        "expanded": noise("bfloat16", 1, 5).expand(4, 5),
        "row": noise("float32", 500, 3)[7],
        "conjugated": noise("complex64", 5).conj(),
    },
    "names": lambda: {"ünï.cödé/☃": noise("int8", 3), "": {"": noise("int8", 2)}, "a.b": {"c": noise("int8", 1)}},
    "several blocks": lambda: {"large": noise("float32", 4_500_000), "small": noise("int8", 3)},
}


def load(reader: Reader) -> Any:
    """Return the state of an open checkpoint, through the contract of `Reader` alone."""
    values: dict[str, Any] = {}
    for name, stored in reader.flat.leaves.items():
        values[name] = allocate(reader.leaf_specs[name].kind, stored.dtype, stored.shape)
        leaf = Leaf.of(name, values[name])
        assert leaf is not None
        out = leaf.host_bytes()
        assert out is not None
        reader.read(name, 0, stored.nbytes, out)
    for name, alias in reader.flat.aliases.items():
        values[name] = make_view(values[alias.of], alias)
    return unflatten(reader.flat.skeleton, values)


# Flipped bits per file, in a checkpoint of few files and of many files.
_FLIPS_IN_A_FILE, _FLIPS_IN_EACH_OF_MANY, _MANY_FILES, _MOST_FAILURES = 30, 3, 3, 4
_LARGE = "several blocks"
# A third of the examples that the profile of Hypothesis asks for: each example writes a checkpoint.
_property = settings(max_examples=settings().max_examples // 3, deadline=None, suppress_health_check=list(HealthCheck))


class ReadResult(NamedTuple):
    """The state of a checkpoint and the problems of its audit; None for the state if a TensorkeepError was raised."""

    state: Any
    problems: list[Problem]
    refused: bool


class FormatSuite:
    """The tests of a format; see ``tensorkeep.formats.base.Format``.

    Attributes
    ----------
    format : Format
        The format to test.
    options : dict
        The format's options for every write, as keyword arguments of `tensorkeep.save`.
    compression : str
        The compression of every write.
    keeps_metadata : bool
        Whether the format stores the user's metadata; otherwise it must refuse it.
    carries_everything : bool
        Whether every state can be written; otherwise some values (numpy arrays, ranges...) may be refused.
    detects_damage : bool
        Whether a changed byte never results in a changed value.
    covers_every_byte : bool
        Whether a change of any byte of any file is detected.
    """

    format: ClassVar[Format]
    options: ClassVar[dict[str, Any]] = {}
    compression: ClassVar[str] = "none"
    keeps_metadata: ClassVar[bool] = True
    carries_everything: ClassVar[bool] = True
    detects_damage: ClassVar[bool] = True
    covers_every_byte: ClassVar[bool] = False

    def destination(self, folder: Path) -> Path:
        """Return the path for a checkpoint of the format in a folder."""
        return folder / "checkpoint"

    def save(self, state: Any, path: Path, *, overwrite: bool = False, **settings: Any) -> WriteResult:
        """Write a state with the suite's settings."""
        options = self.format.parse_options(settings.pop("options", self.options))
        given = {"compression": self.compression, "threads": 2, **settings}
        check_saveable(flat := flatten(state))
        return self.format.write(flat, path, WriteSettings(overwrite=overwrite, options=options, **given))

    def read(self, path: Path) -> Any:
        """Return the state of a checkpoint."""
        with self.format.open(path, OpenSettings()) as reader:
            return load(reader)

    def read_damaged(self, path: Path) -> ReadResult:
        """Read and audit a checkpoint that may be damaged; errors other than TensorkeepError fail the test."""
        try:
            with self.format.open(path, OpenSettings()) as reader:
                return ReadResult(load(reader), list(reader.audit()), refused=False)
        except TensorkeepError:
            return ReadResult(None, [], refused=True)

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        """A checkpoint of `training_state`."""
        path = self.destination(tmp_path)
        self.save(training_state(), path)
        return path

    def check_round_trip(self, state: Any, path: Path) -> None:
        """Save and load a state; compare the state, and the reported size with the files."""
        written = self.save(state, path)
        assert written.stored_bytes == sum(map(len, content(path).values()))
        with self.format.open(path, OpenSettings()) as reader:
            assert list(reader.audit()) == []
            assert difference(state, load(reader)) is None

    def test_states_round_trip(self, tmp_path: Path) -> None:
        for number, (label, make) in enumerate(STATES.items()):
            if label != _LARGE:
                (folder := tmp_path / str(number)).mkdir()
                with case(label):
                    self.check_round_trip(make(), self.destination(folder))

    def test_every_torch_dtype_round_trips(self, tmp_path: Path) -> None:
        state = {
            name: {"odd": noise("uint8", 3), "many": noise(name, 5, 7), "one": noise(name), "none": noise(name, 0)}
            for name, dtype in BY_NAME.items()
            if dtype.has_torch
        }
        self.check_round_trip(state, self.destination(tmp_path))

    def test_every_numpy_dtype_round_trips(self, tmp_path: Path) -> None:
        if not self.carries_everything:
            pytest.skip("the format does not store numpy arrays")
        state = {}
        for name, dtype in BY_NAME.items():
            if dtype.has_numpy:
                array: npt.NDArray[Any] = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.numpy)
                state[name] = {"array": array, "turned": array.T.copy().T, "scalar": array[0, 1]}
        self.check_round_trip(state, self.destination(tmp_path))

    @_property
    @given(state=states)
    def test_any_state_round_trips_or_is_refused(self, state: Any) -> None:
        assert self._comes_back(state) or not self.carries_everything

    @_property
    @given(state=odd_states)
    @with_odd_examples
    def test_an_odd_state_round_trips_or_is_refused(self, state: Any) -> None:
        self._comes_back(state)

    def _comes_back(self, state: Any) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            path = self.destination(Path(folder))
            try:
                self.save(state, path)
            except UnsupportedError:
                # A refused save leaves no file.
                assert names_in(Path(folder)) == []
                return False
            assert difference(state, self.read(path)) is None
            # No other format may claim the files: the state can have names of their files.
            assert {each.name for each in FORMATS if each.recognises(path)} <= {self.format.name}
            return True

    def test_mapped_memory_has_the_bytes_that_are_read_and_does_not_change_the_file(self, saved: Path) -> None:
        before = content(saved)
        with self.format.open(saved, OpenSettings()) as reader:
            for name, leaf in reader.flat.leaves.items():
                expected = np.empty(leaf.nbytes, np.uint8)
                reader.read(name, 0, leaf.nbytes, expected)
                mapped = reader.mapped(name)
                if mapped is not None:
                    assert bytes(mapped) == bytes(expected)
                    # The mapping is private: writes to it must not reach the file.
                    mapped[:] = 0
        assert content(saved) == before

    def test_shared_storage_is_restored(self, saved: Path) -> None:
        model = self.read(saved)["model"]
        assert model["embed"] is model["head"]
        assert model["half"].untyped_storage().data_ptr() == model["embed"].untyped_storage().data_ptr()
        assert model["turned"].untyped_storage().data_ptr() == model["embed"].untyped_storage().data_ptr()

    def test_entries_describe_every_tensor(self, saved: Path) -> None:
        flat = flatten(training_state())
        with self.format.open(saved, OpenSettings()) as reader:
            assert list(reader.entries) == list(leaf_specs(flat.skeleton))
            assert reader.leaf_specs == leaf_specs(flat.skeleton)
            for name, entry in reader.entries.items():
                source = flat.leaves.get(name)
                assert (entry.alias_of is None) == (source is not None)
                assert entry.part == flat.parts[name][0]
                if source is not None:
                    assert (entry.dtype, entry.shape, entry.nbytes) == (source.dtype, source.shape, source.nbytes)
            assert reader.format == self.format.name

    def test_only_checkpoints_of_the_format_are_recognised(self, saved: Path, tmp_path: Path) -> None:
        assert self.format.recognises(saved)
        (tmp_path / "empty").mkdir()
        (tmp_path / "text.txt").write_text("hello")
        others = [tmp_path / "empty", tmp_path / "text.txt", tmp_path / "missing"]
        for name in FORMATS.names():
            if name != self.format.name:
                others.append(tmp_path / f"of-{name}")
                FORMATS.get(name).write(flatten(STATES["flat"]()), others[-1], WriteSettings())
        assert [path.name for path in others if self.format.recognises(path)] == []

    def test_metadata_round_trips_or_is_refused(self, tmp_path: Path) -> None:
        path = self.destination(tmp_path)
        if self.keeps_metadata:
            self.save(STATES["flat"](), path, metadata={"run": "7 ☃"})
            with self.format.open(path, OpenSettings()) as reader:
                assert reader.metadata["run"] == "7 ☃"
        else:
            with pytest.raises(UnsupportedError):
                self.save(STATES["flat"](), path, metadata={"run": "7"})
            assert names_in(tmp_path) == []

    def test_an_existing_checkpoint_is_not_overwritten(self, saved: Path, tmp_path: Path) -> None:
        before = content(saved)
        with pytest.raises(DestinationExistsError):
            self.save(STATES["flat"](), saved)
        assert content(saved) == before
        assert names_in(tmp_path) == [saved.name]

    def test_overwrite_replaces_the_checkpoint(self, saved: Path, tmp_path: Path) -> None:
        self.save(STATES["flat"](), saved, overwrite=True)
        assert difference(STATES["flat"](), self.read(saved)) is None
        assert names_in(tmp_path) == [saved.name]

    def test_overwrite_refuses_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "as a file").mkdir()
        file = self.destination(tmp_path / "as a file")
        file.write_text("precious")
        folder = self.destination(tmp_path / "as a folder")
        folder.mkdir(parents=True)
        (folder / "precious.txt").write_text("precious")
        for path in (file, folder):
            before = content(path)
            with pytest.raises(DestinationExistsError):
                self.save(STATES["flat"](), path, overwrite=True)
            assert content(path) == before

    def test_unknown_options_and_compressions_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            self.save(STATES["flat"](), self.destination(tmp_path), options={"no_such_option": 1})
        with pytest.raises((UsageError, UnsupportedError)):
            self.save(STATES["flat"](), self.destination(tmp_path), compression="no-such-codec")
        assert names_in(tmp_path) == []

    def test_a_truncated_file_never_gives_a_wrong_value(self, saved: Path) -> None:
        whole, files = training_state(), _files(saved)
        for number, (file, data) in enumerate(files):
            lengths = sorted({0, 1, 7, 8, 9, 100, len(data) // 3, len(data) // 2, len(data) - 1})
            # With many files, each is cut to every third of these lengths.
            for length in lengths[number % 3 :: 3] if len(files) > _MANY_FILES else lengths:
                file.write_bytes(data[:length])
                found = self.read_damaged(saved)
                assert found.refused or found.problems or same(whole, found.state), f"{file.name} cut to {length}"
            file.write_bytes(data)
        assert same(whole, self.read(saved))

    def test_a_flipped_bit_is_detected_or_harmless(self, saved: Path) -> None:
        few = len(_files(saved)) <= _MANY_FILES
        self.check_flipped_bits(saved, _FLIPS_IN_A_FILE if few else _FLIPS_IN_EACH_OF_MANY)

    def check_flipped_bits(self, path: Path, count: int) -> int:
        """Flip one bit at a time, in up to ``count`` bytes per file; return the number of flips.

        The bytes are the same in every run. A thorough test of a format calls this with a large count.
        """
        state, random, checked = training_state(), np.random.default_rng(5), 0
        for file, data in _files(path):
            for place in map(int, random.permutation(len(data))[:count]):
                damaged = bytearray(data)
                damaged[place] ^= 1 << int(random.integers(8))
                file.write_bytes(damaged)
                found = self.read_damaged(path)
                noticed = found.refused or bool(found.problems)
                assert noticed or not self.covers_every_byte, f"{file.name} byte {place}"
                assert noticed or not self.detects_damage or same(state, found.state), f"{file.name} byte {place}"
                checked += 1
            file.write_bytes(data)
        return checked

    def test_a_missing_file_is_detected(self, saved: Path) -> None:
        for file, data in _files(saved):
            file.unlink()
            assert self.read_damaged(saved).refused, file.name
            file.write_bytes(data)

    def test_several_blocks_round_trip_and_any_range_can_be_read_from_any_thread(self, tmp_path: Path) -> None:
        state, path = STATES[_LARGE](), self.destination(tmp_path)
        self.check_round_trip(state, path)
        expected = state["large"].numpy().view(np.uint8)
        random = np.random.default_rng(3)
        # Around the border of two blocks, and at random places.
        starts = [BLOCK_BYTES - 40, *(random.integers(0, expected.size // 4, 8) * 4)]
        ranges = [[start, min(start + random.integers(1, 2**16) * 4, expected.size)] for start in starts]
        with self.format.open(path, OpenSettings()) as reader, ThreadPoolExecutor(8) as pool:

            def read(bounds: list[int]) -> bool:
                start, stop = map(int, bounds)
                out = np.empty(stop - start, np.uint8)
                reader.read("large", start, stop, out)
                return np.array_equal(out, expected[start:stop])

            assert all(pool.map(read, [*ranges, [0, expected.size], [4, 4]]))

    def test_a_checkpoint_can_be_converted(self, tmp_path: Path) -> None:
        # The leaves come from another checkpoint, and the full state is never in memory.
        native = FORMATS.get("native")
        native.write(flatten(training_state()), tmp_path / "native", WriteSettings())
        with native.open(tmp_path / "native", OpenSettings()) as reader:
            options = self.format.parse_options(self.options)
            given = WriteSettings(compression=self.compression, options=options, threads=2)
            self.format.write(reader.flat, self.destination(tmp_path), given)
        assert difference(training_state(), self.read(self.destination(tmp_path))) is None
        with self.format.open(self.destination(tmp_path), OpenSettings()) as reader:
            native.write(reader.flat, tmp_path / "back", WriteSettings())
        with native.open(tmp_path / "back", OpenSettings()) as reader:
            assert difference(training_state(), load(reader)) is None

    @pytest.mark.parametrize("call", ["pwrite", "fsync"])
    def test_a_failing_disk_leaves_the_old_checkpoint(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders = [tmp_path / name for name in ("new", "over another", "undisturbed")]
        new, old, undisturbed = map(self.destination, folders)
        for folder in folders:
            folder.mkdir()
        self.save(training_state(), old)
        disk = FailingDisk(getattr(os, call))
        monkeypatch.setattr(os, call, disk)
        self.save(STATES["flat"](), undisturbed)  # counts the calls
        assert disk.calls > 0, f"the format never calls os.{call}, so it cannot be durable"
        # The last fsync follows the rename: when it fails, the new checkpoint is already visible.
        last = disk.calls - 1 if call == "fsync" else disk.calls
        numbers = np.unique(np.linspace(1, last, _MOST_FAILURES).astype(int)).tolist()
        for number, path in product(numbers, (new, old)):
            disk.fail_at(number)
            with case(f"failure {number}, {path.parent.name}"):
                with pytest.raises(StoreError):
                    self.save(STATES["flat"](), path, overwrite=path == old)
                assert (names_in(new.parent), names_in(old.parent)) == ([], [old.name])
                assert same(training_state(), self.read(old))


def _files(path: Path) -> list[tuple[Path, bytes]]:
    return [(path.parent / name, data) for name, data in content(path).items()]
