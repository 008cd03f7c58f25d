"""The conformance suite of formats: tests that every format must pass.

Subclass it in your tests, with the format and its capabilities; pytest then runs all tests on it::

    class TestMyFormat(FormatSuite):
        format = my_package.my_format.FORMAT
        keeps_metadata = False
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

from tensorkeep.errors import DestinationExistsError, StoreError, TensorkeepError, UnsupportedError, UsageError
from tensorkeep.formats.base import (
    BLOCK_BYTES,
    FORMATS,
    Format,
    OpenSettings,
    Problem,
    WriteResult,
    WriteSettings,
    check_saveable,
)
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.tree import flatten, leaf_specs
from tensorkeep.testing import strategies
from tensorkeep.testing.cases import case
from tensorkeep.testing.disk import FailingDisk, content, names_in
from tensorkeep.testing.equality import difference, same
from tensorkeep.testing.format_states import STATES, load, noise, training_state

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
    @given(state=strategies.states)
    def test_any_state_round_trips_or_is_refused(self, state: Any) -> None:
        assert self._comes_back(state) or not self.carries_everything

    @_property
    @given(state=strategies.odd_states)
    @strategies.with_odd_examples
    def test_an_odd_state_round_trips_or_is_refused(self, state: Any) -> None:
        self._comes_back(state)

    def _comes_back(self, state: Any) -> bool:
        """Save and load a state; return False if it was refused and left nothing. A saved state must load."""
        with tempfile.TemporaryDirectory() as folder:
            path = self.destination(Path(folder))
            try:
                self.save(state, path)
            except UnsupportedError:
                assert names_in(Path(folder)) == []
                return False
            assert difference(state, self.read(path)) is None
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
        """The leaves come from another checkpoint, and the full state is never in memory."""
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
