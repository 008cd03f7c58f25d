"""The spin count of OpenMP threads: set for commands that compute, before torch is loaded, unless the user chose."""

import os
import subprocess
import sys

import pytest

from tensorkeep.cli.openmp import SPIN_COUNT, limit_spinning

SHOW = """
import os, sys
from tensorkeep.cli.main import main
code = main(sys.argv[1:])
assert "torch" in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "computes"),
    [
        (["train", "--list-recipes"], True),
        (["tune", "training"], True),
        (["bench", "training", "x.json"], True),
        (["bench", "checkpoint"], False),
        (["info", "train"], False),
        ([], False),
    ],
)
def test_only_commands_that_compute_are_limited(
    monkeypatch: pytest.MonkeyPatch, words: list[str], computes: bool
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    environment: dict[str, str] = {}
    limit_spinning(words, environment)
    assert environment == ({"GOMP_SPINCOUNT": SPIN_COUNT} if computes else {})


def test_nothing_is_set_once_torch_is_loaded() -> None:
    environment: dict[str, str] = {}
    limit_spinning(["train"], environment)
    assert environment == {}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_the_choice_of_the_user_is_kept(chosen: dict[str, str], expected: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", SHOW, "-q", "train", "--list-recipes"]
    shown = subprocess.run(command, env=inherited | chosen, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [expected]
