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


def test_errno_of_store_errors() -> None:
    error = errors.StoreError("cannot write", errno=errno.ENOSPC)
    assert pickle.loads(pickle.dumps(error)).errno == error.errno == errno.ENOSPC
    assert errors.StoreError("cannot write").errno is None
    assert errors.BusyError("busy").errno == errno.EAGAIN
    assert errors.NotFoundError("missing").errno == errno.ENOENT
    assert errors.DestinationExistsError("exists").errno == errno.EEXIST


def test_a_corrupt_block_is_named() -> None:
    error = errors.CorruptCheckpointError("the checksum differs", path="a", name="w", block=3)
    assert str(error) == "a: tensor 'w' block 3: the checksum differs\ntake another checkpoint or copy"
    assert error.as_dict()["block"] == 3
    assert str(errors.CorruptCheckpointError("the checksum differs", path="a", block=3)).startswith("a: file block 3: ")


def test_a_state_mismatch_lists_the_names() -> None:
    error = errors.StateMismatchError("does not fit", missing=("a",), extra=("b",), different=("c",))
    assert (error.missing, error.extra, error.different) == (("a",), ("b",), ("c",))


def test_error_kinds_and_exit_codes() -> None:
    kinds = {
        error.kind: error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.TensorkeepError)
    }
    assert kinds == {
        "error": 1,
        "diverged": 1,
        "usage": 2,
        "state-mismatch": 2,
        "tensor-not-found": 2,
        "store": 3,
        "out-of-memory": 3,
        "ranks-disagree": 3,
        "busy": 3,
        "corrupt": 4,
        "not-a-checkpoint": 5,
        "not-found": 5,
        "destination-exists": 6,
        "unsupported": 7,
        "technique-not-active": 7,
        "unsupported-leaf": 7,
        "missing-extra": 7,
    }
