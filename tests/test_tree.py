"""Rules of the source tree: import layers, docstrings, public names, error kinds and file names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensorkeep
from tensorkeep import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tensorkeep"

# A package may import those with a lower number. `codecs` and `io` must not import each other.
LAYERS = {
    "errors": 0,
    "units": 0,
    "plugins": 0,
    "version": 0,
    "machine": 0,
    "state": 1,
    "codecs": 2,
    "io": 2,
    "formats": 3,
    "checkpoint": 4,
    "torch": 5,
    "safetensors": 5,
    "train": 5,
    "report": 7,
    "bench": 6,
    "cli": 8,
    "testing": 9,
}
BLIND = {("codecs", "io"), ("io", "codecs")}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    """Return the packages that a module imports, anywhere in it, type checking included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module] if node.module != "tensorkeep" else [f"tensorkeep.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tensorkeep.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    own = package_of(path)
    if own in ("__init__", "__main__"):
        return
    for other in imported_packages(path) - {own, "__version__"}:
        assert LAYERS[other] <= LAYERS[own], f"{own} must not import {other}"
        assert LAYERS[other] < LAYERS[own] or LAYERS[own] == 0, f"{own} and {other} are in the same layer"
        assert (own, other) not in BLIND


def test_the_import_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from tensorkeep.checkpoint.save.save import save\nimport tensorkeep.cli.main\n")
    assert imported_packages(bad) == {"checkpoint", "cli"}


def test_the_annotated_tree_is_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert block is not None
    listed = set()
    stack: list[str] = []
    for line in block.group(1).splitlines():
        if not line.strip():
            continue
        name = line.strip().split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        stack = stack[:depth] + [name.rstrip("/")]
        if not name.endswith("/"):
            listed.add("/".join(stack))
    actual = {str(path.relative_to(ROOT)) for path in modules()}
    assert listed - actual == set(), "listed, but missing"
    assert actual - listed == set(), "not listed"


def test_every_module_has_a_docstring() -> None:
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


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
        "SaveReport",
        "SaveWhen",
        "StateMismatchError",
        "Step",
        "StoreError",
        "TechniqueNotActiveError",
        "TensorkeepError",
        "UnsupportedError",
        "UnsupportedLeafError",
        "UsageError",
        "VerifyReport",
        "__version__",
        "convert",
        "diff",
        "info",
        "load",
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


def test_importing_tensorkeep_imports_neither_torch_nor_numpy() -> None:
    code = "import tensorkeep, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_no_module_is_called_utils_or_helpers() -> None:
    for path in modules():
        assert not {"utils", "helpers", "common", "misc"} & {part.removesuffix(".py") for part in path.parts}
