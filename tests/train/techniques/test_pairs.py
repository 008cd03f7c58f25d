"""Every pair of techniques without a conflict: both are proved, and the run resumes exactly."""

import json
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorkeep.errors import UsageError
from tensorkeep.testing.equality import difference
from tensorkeep.testing.technique_suite import TINY, last_state, losses, train_run, with_techniques
from tensorkeep.train.config.recipes import get_recipe
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES
from tensorkeep.train.techniques.parallel import TOGETHER
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import Stack
from train.techniques.several_processes import ProcessPool, task

# Wide enough for low-bit optimizers to quantise; no dropout, which flash attention on CPUs does not support.
# Four processes have two sequences each, which can be split once more.
CONFIG = TINY.changed(
    {"model.d_model": 64, "model.dropout": 0.0, "loop.steps": 3, "loop.batch_size": 8, "checkpoint.every": 1}
)

SETTINGS: dict[str, dict[str, Any]] = {
    "mixed-precision": {"dtype": "bf16"},
    # Traces like inductor, and compiles nothing.
    "compile": {"backend": "aot_eager"},
    "low-bit-optimizer": {"compiled": False},
    "sparse-attention": {"block": 4, "keep": 2},
    # Large enough for low-bit optimizers to quantise.
    "lora": {"rank": 64},
}


def lack(name: str) -> str | None:
    technique = TECHNIQUE_CLASSES.get(name)
    settings = technique.Settings(**SETTINGS.get(name, {}))
    found: str | None = technique(settings).lacks(Machine(torch.device("cpu")))
    return found


HERE = [name for name in TECHNIQUE_CLASSES.names() if name in TOGETHER or lack(name) is None]
POOLS = {2: "two_processes", 4: "four_processes"}
PAIRS = list(combinations(HERE, 2))


def settings(*names: str) -> dict[str, dict[str, Any]]:
    return {name: SETTINGS.get(name, {}) for name in names}


def conflict(first: str, second: str) -> bool:
    try:
        Stack.of(settings(first, second))
    except UsageError as error:
        assert "cannot be combined" in error.message
        return True
    return False


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    # A curriculum by length needs documents of several lengths.
    texts = ["the quick brown fox jumps over the lazy dog; " * (1 + number % 7) for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    prepare(folder / "texts.jsonl", folder / "prepared", tokenizer="char")
    return folder / "prepared"


def processes(pair: tuple[str, str]) -> int:
    """Return how many processes train with a pair of techniques."""
    if "hsdp" in pair or set(pair) == {"fsdp", "tensor-parallel"}:
        # With tensor-parallel as well, a mesh of three dimensions.
        return 8 if set(pair) == {"hsdp", "tensor-parallel"} else 4
    return 2 if set(pair) & set(TOGETHER) else 1


@pytest.mark.slow  # minutes in all
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not conflict(*pair)], ids="+".join)
def test_pair_is_proved_and_resumes_exactly(
    tmp_path: Path, data: Path, pair: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    config = with_techniques(CONFIG, settings(*pair))
    count = processes(pair)
    if count == 1:
        train_run(config, tmp_path / "whole", data)
        train_run(config, tmp_path / "parts", data, stop_after=1)
        train_run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", data, resume=True)
    else:
        pool = ProcessPool(8, tmp_path / "pool") if count == 8 else request.getfixturevalue(POOLS[count])
        tasks = {
            "whole": task("train", config, tmp_path / "whole", data),
            "first part": task("train", config, tmp_path / "parts", data, stop_after=1),
            "second part": task("train", config, tmp_path / "parts", data, resume=True),
        }
        with pool if count == 8 else nullcontext():
            pool.run(tasks)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


def test_fsdp_checkpoints_activations_of_compiled_code(tmp_path: Path, data: Path, two_processes: ProcessPool) -> None:
    """Hooks of the blocks run in plain Python only, for a few rows, and FSDP computes with weights of its own."""
    config = with_techniques(CONFIG, settings("fsdp", "compile", "activation-checkpointing"))
    tasks = {
        "whole": task("train", config, tmp_path / "whole", data),
        "first part": task("train", config, tmp_path / "parts", data, stop_after=1),
        "second part": task("train", config, tmp_path / "parts", data, resume=True),
    }
    results = two_processes.run(tasks)
    assert all("message" not in (each or {}) for process in results for each in process.values()), results
    assert [each[0] for each in losses(tmp_path / "whole")] == [1, 2, 3, 3]
    # The observed first step of a process exchanges the gradients of its batches as often as any other step.
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("recipe", ["shakespeare-char-gpu", "chatgot-85m", "gpt2-124m"])
def test_defaults_of_a_gpu_recipe_are_proved_together_and_resume_exactly(
    tmp_path: Path, data: Path, recipe: str, optimizer: str
) -> None:
    names = [name for name in get_recipe(recipe).default_techniques if name in HERE]
    assert set(names) >= {"compile", "fused-optimizer", "mixed-precision"}
    config = with_techniques(CONFIG.changed({"optim.name": optimizer}), settings(*names))
    train_run(config, tmp_path / "whole", data)
    train_run(config, tmp_path / "parts", data, stop_after=1)
    train_run(RunFolder(tmp_path / "parts").record().config, tmp_path / "parts", data, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


def test_enough_pairs_can_run() -> None:
    # The test above would pass without any pairs.
    assert len(HERE) >= 10
    assert sum(not conflict(*pair) for pair in PAIRS) > len(PAIRS) // 2
