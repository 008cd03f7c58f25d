"""``tensorkeep prune`` deletes damaged steps and steps that no rule keeps, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tensorkeep import CheckpointManager, StoreError
from tensorkeep.cli.main import main
from tensorkeep.formats import sealed
from tensorkeep.formats.native import reader
from tensorkeep.io.directory import Directory
from tensorkeep.testing.disk import content, names_in

RunJson = Callable[..., tuple[int, Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Save five steps and damage the fourth."""
    with CheckpointManager(tmp_path) as manager:
        for number in range(1, 6):
            manager.save(number, {"w": torch.full((10,), float(number))}).wait()
    manifest = tmp_path / "step-000004" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    return tmp_path


def numbers(steps: list[dict[str, Any]]) -> list[int]:
    return [step["step"] for step in steps]


def test_damaged_steps_are_deleted_with_broken(root: Path, run_json: RunJson) -> None:
    code, document = run_json("prune", root, "--keep-last", "2")
    assert code == 0
    assert (numbers(document["deleted"]), document["deleted_broken"]) == ([1, 2], [])
    assert list(document["broken"]) == ["4"]
    code, document = run_json("prune", root, "--broken")
    assert (numbers(document["deleted"]), document["deleted_broken"]) == ([], [4])
    assert numbers(document["kept"]) == [3, 5]
    assert not document["broken"]
    assert names_in(root) == ["step-000003", "step-000005"]


def test_other_folders_and_intact_steps_are_kept(root: Path, run_json: RunJson) -> None:
    (root / "step-000100").mkdir()
    (root / "step-000100" / "thesis.txt").write_text("years of work")
    torch.save({"w": torch.ones(3)}, root / "step-000200")
    later = root / "step-000002"
    body = sealed.read(Directory(later), "manifest.json")
    (later / "manifest.json").write_bytes(sealed.seal({**body, "version": body["version"] + 1}))
    before = content(root)
    real = reader.manifests.read

    def read(directory: Directory) -> Any:
        if directory.path.name == "step-000003":
            raise StoreError("cannot read: Input/output error", path=directory.path)
        return real(directory)

    with mock.patch.object(reader.manifests, "read", read):
        code, document = run_json("prune", root, "--keep-last", "9", "--broken")
    assert code == 0
    assert document["deleted_broken"] == [4]
    assert set(document["broken"]) == {"2", "3", "100", "200"}
    assert "of the format, this release reads version" in document["broken"]["2"]
    assert "Input/output error" in document["broken"]["3"]
    after = content(root)
    gone = set(before) - set(after)
    assert {Path(name).parts[1] for name in gone} == {"step-000004"}
    assert after == {name: data for name, data in before.items() if name not in gone}


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_step_with_files_of_the_user_is_kept(
    root: Path, dry_run: bool, run_json: RunJson, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step-000001" / "eval.json").write_text("{}")
    (root / "step-000004" / "eval.json").write_text("{}")
    arguments = ["prune", str(root), "--keep-last", "1", "--broken", *(["--dry-run"] if dry_run else [])]
    code, document = run_json(*arguments)
    assert code == 0
    assert (numbers(document["deleted"]), document["deleted_broken"]) == ([2, 3], [])
    assert numbers(document["kept"]) == [1, 5]
    assert set(document["left"]) == {"1", "4"}
    assert "holds 'eval.json', which does not belong to the step" in document["left"]["1"]
    assert len(names_in(root)) == (5 if dry_run else 3)
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.count("kept: step 1: ") == 1
    assert output.count("kept: step 4: ") == 1
