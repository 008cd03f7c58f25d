"""The public names, and the cost of importing them."""

import subprocess
import sys

import pytest

import tensorkeep
import tensorkeep.distributed


def test_public_names() -> None:
    assert sorted(tensorkeep.__all__) == [
        "BusyError",
        "Checkpoint",
        "CheckpointManager",
        "CorruptCheckpointError",
        "DestinationExistsError",
        "DiffReport",
        "DivergedError",
        "EverySteps",
        "EveryTime",
        "InfoReport",
        "Keep",
        "KeepBest",
        "KeepEvery",
        "KeepLast",
        "KeepThinned",
        "LazyTensor",
        "MissingExtraError",
        "NotACheckpointError",
        "NotFoundError",
        "OnSignal",
        "OutOfMemoryError",
        "PendingSave",
        "RandomState",
        "RanksDisagreeError",
        "RunLog",
        "SaveReport",
        "SaveWhen",
        "StateMismatchError",
        "StateMismatchWarning",
        "Step",
        "StoreError",
        "TechniqueNotActiveError",
        "TensorNotFoundError",
        "TensorkeepError",
        "UnsupportedError",
        "UnsupportedLeafError",
        "UploadStatus",
        "UsageError",
        "VerifyReport",
        "__version__",
        "convert",
        "diff",
        "info",
        "load",
        "log",
        "open",
        "register",
        "save",
        "save_async",
        "verify",
    ]
    for name in tensorkeep.__all__:
        assert getattr(tensorkeep, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        tensorkeep.nothing_like_it


def test_public_names_for_many_ranks() -> None:
    assert {"DcpReader", "DcpWriter"} <= set(tensorkeep.distributed.__all__)
    for name in tensorkeep.distributed.__all__:
        assert getattr(tensorkeep.distributed, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        tensorkeep.distributed.nothing_like_it


def test_importing_tensorkeep_imports_neither_torch_nor_numpy() -> None:
    code = "import tensorkeep, tensorkeep.distributed, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("enabled", [True, False])
def test_importing_a_public_name_leaves_garbage_collection_as_it_was(enabled: bool) -> None:
    before = "enable" if enabled else "disable"
    code = f"import gc; gc.{before}(); import tensorkeep; tensorkeep.load; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(enabled)
