"""The public names, and the cost of importing them."""

import subprocess
import sys

import pytest

import tensorkeep
import tensorkeep.distributed
from tiers import exhaustive

NAMES = """
BusyError Checkpoint CheckpointManager CorruptCheckpointError DestinationExistsError DiffReport DivergedError
EverySteps EveryTime InfoReport Keep KeepBest KeepEvery KeepLast KeepThinned LazyTensor LocalTier MissingExtraError
NotACheckpointError NotFoundError OnSignal OutOfMemoryError Page PendingSave Placeholder RandomState
RanksDisagreeError ResumableLoader Retention RunLog SaveOptions SaveReport SaveWhen StateMismatchError
StateMismatchWarning Step StoreError TechniqueNotActiveError TensorNotFoundError TensorkeepError UnsupportedError
UnsupportedLeafError UploadStatus UsageError VerifyReport __version__ convert diff info load log open register save
save_async show verify
"""


def test_public_names() -> None:
    assert sorted(tensorkeep.__all__) == NAMES.split()
    assert {"DcpReader", "DcpWriter"} <= set(tensorkeep.distributed.__all__)
    for module in (tensorkeep, tensorkeep.distributed):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
        with pytest.raises(AttributeError, match="nothing_like_it"):
            module.nothing_like_it


@pytest.mark.integration
@pytest.mark.parametrize("before", ["disable", *exhaustive("enable")])
def test_importing_is_cheap_and_leaves_garbage_collection_as_it_was(before: str) -> None:
    program = (
        f"import gc, sys; gc.{before}(); import tensorkeep, tensorkeep.distributed; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules]); tensorkeep.load; print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", str(before == "enable")]
