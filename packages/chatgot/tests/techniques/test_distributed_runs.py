"""Legs, branches, answers of conversations and masked documents, trained by two processes and by one."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from chatgot.config.config import Config
from chatgot.testing import TINY, last_state, losses
from techniques.several_processes import ACTIONS, EXACT, FOUR_STEPS, ProcessPool, Task, task
from tiny_training import check_same, conversations

LEG = {"loop.steps": 6, "loop.batch_size": 8, "optim.lr": 3e-3, "schedule.name": "constant"}
TECHNIQUES: Mapping[str, Mapping[str, object]] = {
    "ddp": {"techniques.ddp": "on"},
    "ddp, micro-batches": {"techniques.ddp": "on", "techniques.gradient-accumulation": "on"},
    "fsdp": {"techniques.fsdp": "on"},
}

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare conversations with answers of many lengths, so that ranks have different numbers of targets."""
    folder = tmp_path_factory.mktemp("answers")
    return conversations(folder, ([("user", f"q{n}"), ("assistant", "a" * (1 + n * n % 11))] for n in range(80)))


Make = Callable[[Config, Path, Path], dict[str, Task]]
"""Returns the tasks that train in the folder ``whole``, and in ``killed`` with interruptions."""


def as_a_leg(config: Config, folder: Path, data: Path) -> dict[str, Task]:
    """Train half of a run, then the rest of it as a leg, which is killed before and after its first checkpoint."""
    longer, whole, killed = config.changed(LEG), folder / "whole", folder / "killed"
    return {
        "half": task("train", config, whole, data, stop_after=2),
        "leg": task("abandon or train", longer, whole, data),
        "half again": task("train", config, killed, data, stop_after=2),
        "killed at once": task("abandon or train", longer, killed, data, abandoned_after=3),
        "killed": task("abandon or train", longer, killed, data, abandoned_after=5),
        "rest": task("abandon or train", longer, killed, data),
    }


def as_a_branch(config: Config, folder: Path, data: Path) -> dict[str, Task]:
    """Train a run, and another one that branches from its step 2."""
    longer, whole, killed = config.changed(LEG), folder / "whole", folder / "killed"
    branch = {"branch": f"{folder / 'source'}@2"}
    return {
        "source": task("train", config, folder / "source", data),
        "branch": task("abandon or train", longer, whole, data, **branch),
        "killed at once": task("abandon or train", longer, killed, data, abandoned_after=3, **branch),
        "killed": task("abandon or train", longer, killed, data, abandoned_after=5, **branch),
        "rest": task("abandon or train", longer, killed, data, **branch),
    }


INTERRUPTED = ("half again", "killed at once", "killed", "rest")
"""The tasks that train in the folder ``killed``."""

MASKED = {"data.mask_documents": True, "model.context_length": 48, "data.order": "random"}
CASES: dict[str, tuple[str, Make, Mapping[str, object]]] = {
    "a leg on answers": ("answers", as_a_leg, {}),
    "a branch with masked documents": ("documents", as_a_branch, MASKED),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_compute_the_same_as_one_and_resume_exactly_after_a_kill(
    technique: str, case: str, tmp_path: Path, two_processes: ProcessPool, request: pytest.FixtureRequest
) -> None:
    data, make, changes = CASES[case]
    place = request.getfixturevalue(data)
    config = TINY.changed({**FOUR_STEPS, **changes, **TECHNIQUES[technique]})
    # With dropout, and without it for comparison with one process.
    found = make(config, tmp_path / "dropout", place)
    exact = make(config.changed({"model.dropout": 0.0}), tmp_path / "exact", place)
    alone = make(EXACT.changed({**FOUR_STEPS, **changes}), tmp_path / "alone", place)
    two_processes.run(found | {f"exact: {name}": each for name, each in exact.items() if name not in INTERRUPTED})
    for name, each in alone.items():
        if name not in INTERRUPTED:
            ACTIONS[each["action"]](each)

    two, one = tmp_path / "exact" / "whole", tmp_path / "alone" / "whole"
    assert [each[:2] for each in losses(two)] == [each[:2] for each in losses(one)]
    assert [each[2] for each in losses(two)] == pytest.approx([each[2] for each in losses(one)], rel=1e-4)
    assert last_state(two)["progress"]["tokens"] == last_state(one)["progress"]["tokens"]

    whole, killed = tmp_path / "dropout" / "whole", tmp_path / "dropout" / "killed"
    check_same(killed, whole, "train", "evaluate")
