"""Runs the tests of safetensors itself against ours: ``python safetensors_suite.py CLONE [PYTEST ARGUMENTS]``.

CLONE is a copy of https://github.com/huggingface/safetensors. The functions of ``safetensors``, ``safetensors.torch``
and ``safetensors.numpy`` are replaced by those of ``tensorkeep.safetensors``. Exits with 1 if another set of tests
fails than `STATED`, whose reasons docs/how-to/migrate.md gives.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

import tensorkeep.safetensors.numpy
import tensorkeep.safetensors.torch

FILES = ("simple", "pt_model", "pt_comparison", "pread_backend", "multithreaded", "threadable", "handle")
STATED = {
    # The header is padded to a whole page, for direct I/O.
    "test_simple.py::TestCase::test_serialization",
    "test_pt_comparison.py::TorchTestCase::test_serialization",
    "test_pt_model.py::TorchModelTestCase::test_save",
    # Tensors that are not contiguous are saved, in C order.
    "test_pt_comparison.py::SliceTestCase::test_cannot_serialize_a_non_contiguous_tensor",
    # Slices end where the tensor ends, as in torch and numpy.
    "test_simple.py::ReadmeTestCase::test_numpy_slice",
    # Errors have other texts, which name a remedy.
    "test_simple.py::ErrorsTestCase::test_file_not_found",
    "test_pt_comparison.py::TorchTestCase::test_bogus",
    "test_pt_comparison.py::TorchTestCase::test_meta_tensor",
    "test_pt_comparison.py::TorchTestCase::test_sparse",
}


class Outcomes:
    """A plug-in of pytest that records what passes and what fails."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("tests/")[2]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)


def replace_functions() -> None:
    """Replace the functions of safetensors by ours, as users do for libraries that call them."""
    pairs = {safetensors.torch: tensorkeep.safetensors.torch, safetensors.numpy: tensorkeep.safetensors.numpy}
    for theirs, ours in pairs.items():
        for name in ours.__all__:
            setattr(theirs, name, getattr(ours, name))
    safetensors.safe_open = tensorkeep.safetensors.safe_open


def main(clone: Path, *arguments: str) -> int:
    """Run the suite; return the exit code."""
    replace_functions()
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(clone / "bindings" / "python" / "tests", Path(folder, "tests"))
        Path(folder, "tests", "data").mkdir(exist_ok=True)
        os.chdir(folder)
        files = [f"tests/test_{name}.py" for name in FILES]
        pytest.main(["-q", "-p", "no:cacheprovider", "--tb=no", *files, *arguments], plugins=[outcomes])
        os.chdir("/")
    print(f"{len(outcomes.passed)} pass, {len(outcomes.failed)} fail, {len(STATED)} of these are stated")
    for name in sorted(outcomes.failed ^ STATED):
        print(f"{'fails' if name in outcomes.failed else 'is stated to fail, and does not'}: {name}")
    return int(not outcomes.passed or outcomes.failed != STATED)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
