"""``tensorkeep prune`` deletes damaged steps and steps that no rule keeps, and nothing else."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from command_line import Call, RunJson
from tensorkeep import CheckpointManager, StoreError
from tensorkeep.cli.main import main
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.native import reader
from tensorkeep.storage.base import Directory
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.testing.cases import case
from tensorkeep.testing.format_suite import content, names_in


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
    document = run_json("prune", root, "--keep-last", "2")
    assert (numbers(document["deleted"]), document["deleted_broken"]) == ([1, 2], [])
    assert list(document["broken"]) == ["4"]
    document = run_json("prune", root, "--broken")
    assert (numbers(document["deleted"]), document["deleted_broken"]) == ([], [4])
    assert numbers(document["kept"]) == [3, 5]
    assert not document["broken"]
    assert names_in(root) == ["step-000003", "step-000005"]


def test_other_folders_and_intact_steps_are_kept(root: Path, run_json: RunJson) -> None:
    (root / "step-000100").mkdir()
    (root / "step-000100" / "thesis.txt").write_text("years of work")
    torch.save({"w": torch.ones(3)}, root / "step-000200")
    later = root / "step-000002"
    body = checksummed_json.read(LocalDirectory(later), "manifest.json")
    (later / "manifest.json").write_bytes(checksummed_json.seal({**body, "version": body["version"] + 1}))
    before = content(root)
    real = reader.manifests.read_outline

    def read(directory: Directory, *names: str) -> Any:
        if directory.path.name == "step-000003":
            raise StoreError("cannot read: Input/output error", path=directory.path)
        return real(directory, *names)

    with mock.patch.object(reader.manifests, "read_outline", read):
        document = run_json("prune", root, "--keep-last", "9", "--broken")
    assert document["deleted_broken"] == [4]
    assert set(document["broken"]) == {"2", "3", "100", "200"}
    assert "of the format, this release reads version" in document["broken"]["2"]
    assert "Input/output error" in document["broken"]["3"]
    after = content(root)
    gone = set(before) - set(after)
    assert {Path(name).parts[1] for name in gone} == {"step-000004"}
    assert after == {name: data for name, data in before.items() if name not in gone}


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_step_with_files_of_the_user_is_kept(root: Path, dry_run: bool, run_json: RunJson, call: Call) -> None:
    (root / "step-000001" / "eval.json").write_text("{}")
    (root / "step-000004" / "eval.json").write_text("{}")
    arguments = ["prune", str(root), "--keep-last", "1", "--broken", *(["--dry-run"] if dry_run else [])]
    document = run_json(*arguments)
    assert (numbers(document["deleted"]), document["deleted_broken"]) == ([2, 3], [])
    assert (numbers(document["kept"]), set(document["left"])) == ([1, 5], {"1", "4"})
    assert "holds 'eval.json', which does not belong to the step" in document["left"]["1"]
    assert len(names_in(root)) == (5 if dry_run else 3)
    output = call(*arguments).out
    assert output.count("kept: step 1: ") == output.count("kept: step 4: ") == 1


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes stdin and stderr a terminal, at which this is typed."""

    def type_in(text: str) -> None:
        stdin = io.StringIO(text)
        monkeypatch.setattr(stdin, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    return type_in


def test_nothing_is_deleted_without_a_yes(root: Path, answer: Any, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(root)
    for typed in ("n\n", "\n", "", "maybe\n"):
        with case(typed):
            answer(typed)
            out, err = call("prune", root, "--keep-last", "1", code=1)
            assert content(root) == before
            assert "delete:\nstep" in out and "kept: 5\n" in out and "deleted" not in out
            assert "Delete 3 steps and free " in err and "nothing was deleted" in err
    monkeypatch.setattr(sys.stdin, "readline", mock.Mock(side_effect=KeyboardInterrupt))
    call("prune", root, "--keep-last", "1", code=130)
    assert content(root) == before
    # Nothing is asked if nothing would be deleted.
    answer("n\n")
    assert "Delete" not in call("prune", root, "--keep-last", "9").err
    assert "no step has a value of a metric" in call("prune", root, "--keep-best", "1", code=2).err
    assert content(root) == before


@pytest.mark.parametrize(
    ("typed", "more"), [("y\n", []), ("YES\n", []), ("n\n", ["--yes"]), ("n\n", ["-y"]), ("n\n", ["--json"])]
)
def test_a_yes_deletes_on_a_terminal(root: Path, typed: str, more: list[str], answer: Callable[[str], None]) -> None:
    answer(typed)
    assert main(["prune", str(root), "--keep-last", "1", *more]) == 0
    assert names_in(root) == ["step-000004", "step-000005"]


def test_rules_that_are_not_clear_are_refused_and_nothing_is_deleted(tmp_path: Path, call: Call) -> None:
    with CheckpointManager(tmp_path) as manager:
        for number in range(3):
            manager.save(number, {"w": torch.zeros(1)}, metrics={"loss": 1.0, "score": 2.0})
    for rules, message in (
        ("", "no rule says which steps to keep"),
        ("--keep-best 2 --metric los", "no step has the metric 'los', only loss, score"),
        ("--keep-best 2", "several metrics: loss, score"),
        ("--keep-best 2 --metric score", "'score' does not say"),
        ("--keep-best 2 --metric loss --mode least", "--mode"),
    ):
        with case(rules):
            assert message in call("prune", tmp_path, *rules.split(), code=2).err
            assert len(names_in(tmp_path)) == 3
