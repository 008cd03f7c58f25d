"""Errors: their built-in bases, their texts, and that they survive pickling between processes."""

import errno
import pickle

import pytest

from tensorkeep import errors

BASES = {
    errors.DivergedError: ArithmeticError,
    errors.UsageError: ValueError,
    errors.StateMismatchError: ValueError,
    errors.TensorNotFoundError: KeyError,
    errors.StoreError: OSError,
    errors.BusyError: BlockingIOError,
    errors.OutOfMemoryError: MemoryError,
    errors.RanksDisagreeError: RuntimeError,
    errors.CorruptCheckpointError: ValueError,
    errors.NotACheckpointError: ValueError,
    errors.NotFoundError: FileNotFoundError,
    errors.DestinationExistsError: FileExistsError,
    errors.UnsupportedError: NotImplementedError,
    errors.UnsupportedLeafError: TypeError,
    errors.MissingExtraError: ImportError,
}


@pytest.mark.parametrize("cls", BASES, ids=lambda cls: cls.__name__)
def test_errors_are_built_in_errors_and_pickle(cls: type[errors.TensorkeepError]) -> None:
    error = cls("it failed", path="run/step-1", remedy="try again")
    assert isinstance(error, BASES[cls])
    assert str(error) == "run/step-1: it failed\ntry again"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (str(again), again.as_dict()) == (str(error), error.as_dict())
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_numbers_blocks_and_names_are_kept() -> None:
    error = errors.StoreError("cannot write", errno=errno.ENOSPC)
    assert pickle.loads(pickle.dumps(error)).errno == error.errno == errno.ENOSPC
    assert errors.StoreError("cannot write").errno is None
    numbered = errors.BusyError("busy"), errors.NotFoundError("missing"), errors.DestinationExistsError("exists")
    assert [each.errno for each in numbered] == [errno.EAGAIN, errno.ENOENT, errno.EEXIST]
    corrupt = errors.CorruptCheckpointError("the checksum differs", path="a", name="w", block=3)
    assert str(corrupt) == "a: tensor 'w' block 3: the checksum differs\ntake another checkpoint or copy"
    assert corrupt.as_dict()["block"] == 3
    assert str(errors.CorruptCheckpointError("the checksum differs", path="a", block=3)).startswith("a: file block 3: ")
    mismatch = errors.StateMismatchError("does not fit", missing=("a",), extra=("b",), different=("c",))
    assert (mismatch.missing, mismatch.extra, mismatch.different) == (("a",), ("b",), ("c",))


def test_error_kinds_and_exit_codes() -> None:
    classes = (each for each in vars(errors).values() if isinstance(each, type))
    kinds = {each.kind: each.exit_code for each in classes if issubclass(each, errors.TensorkeepError)}
    expected = {
        1: "error diverged",
        2: "usage state-mismatch tensor-not-found",
        3: "store out-of-memory ranks-disagree busy",
        4: "corrupt",
        5: "not-a-checkpoint not-found",
        6: "destination-exists",
        7: "unsupported technique-not-active unsupported-leaf missing-extra",
    }
    assert kinds == {kind: code for code, words in expected.items() for kind in words.split()}


def test_a_warning_names_the_line_outside_of_the_package() -> None:
    inside = {"__name__": "tensorkeep.somewhere.deep", "warn": errors.warn_caller}
    exec("def outer(): inner()\ndef inner(): warn('careful')", inside)
    with pytest.warns(UserWarning, match="careful") as caught:
        inside["outer"]()
    assert caught[0].filename == __file__
