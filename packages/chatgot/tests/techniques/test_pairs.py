"""Stacks of techniques, which together have every pair without a conflict: all are proved, and runs resume exactly."""

import json
from collections.abc import Collection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgot.config.config import Config
from chatgot.config.recipes import get_recipe
from chatgot.data.prepare import prepare
from chatgot.techniques.base import TECHNIQUE_CLASSES, Machine
from chatgot.techniques.distributed import PARALLEL_TECHNIQUES
from chatgot.techniques.stack import Stack
from chatgot.testing import TINY, killed_copy, last_state, losses, with_techniques
from techniques.several_processes import ACTIONS, ProcessPool, task
from tensorkeep.errors import UsageError
from tensorkeep.testing.equality import difference

# Wide enough for low-bit optimizers to quantise; no dropout, which flash attention on CPUs does not support.
# Four processes have two sequences each, which can be split once more.
CONFIG = TINY.changed(
    {"model.d_model": 64, "model.dropout": 0.0, "loop.steps": 3, "loop.batch_size": 8}
    | {"checkpoint.every": 1, "checkpoint.keep_last": 3}
)
ONE_BLOCK = CONFIG.changed({"model.n_layers": 1, "loop.steps": 2})

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
    found: str | None = technique(settings).missing(Machine(torch.device("cpu")))
    return found


HERE = [name for name in TECHNIQUE_CLASSES.names() if name in PARALLEL_TECHNIQUES or lack(name) is None]
IN_ONE_WORKER = pytest.mark.xdist_group("processes")
MOST = 7
"""Techniques of a stack. More would make fewer stacks, and a failure harder to explain."""


def settings(*names: str) -> dict[str, dict[str, Any]]:
    return {name: SETTINGS.get(name, {}) for name in names}


def conflict(first: str, second: str) -> bool:
    try:
        Stack.of(settings(first, second))
    except UsageError as error:
        assert "cannot be combined" in error.message
        return True
    return False


PAIRS = [pair for pair in combinations(HERE, 2) if not conflict(*pair)]


def covering_stacks() -> list[tuple[str, ...]]:
    """Return stacks without conflicts that together have all pairs: each begins with the first pair that is left."""
    stacks, left = [], dict.fromkeys(PAIRS)
    while left:
        stack = set(next(iter(left)))
        while len(stack) < MOST:
            gains = {name: _pairs(name, stack) for name in HERE if name not in stack}
            gains = {name: found for name, found in gains.items() if found <= ALLOWED}
            best = max(gains, key=lambda name: len(gains[name] & left.keys()), default=None)
            if best is None or not gains[best] & left.keys():
                break
            stack.add(best)
        stacks.append(tuple(sorted(stack)))
        for pair in combinations(stacks[-1], 2):
            left.pop(pair, None)
    return stacks


def _pairs(name: str, stack: set[str]) -> set[tuple[str, ...]]:
    return {tuple(sorted((name, other))) for other in stack}


ALLOWED = set(PAIRS)
STACKS = covering_stacks()
IN_MAKE_TEST = 10
"""The number of the stack that is not left to the exhaustive tests: of one process, without a compiler."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    # A curriculum by length needs documents of several lengths.
    texts = ["the quick brown fox jumps over the lazy dog; " * (1 + number % 7) for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    prepare(folder / "texts.jsonl", folder / "prepared", tokenizer="char")
    return folder / "prepared"


def processes(stack: Collection[str]) -> int:
    """Return how many processes train with a stack of techniques."""
    # With tensor-parallel as well, each has a mesh of one dimension more.
    least = 4 if "hsdp" in stack else 2 if set(PARALLEL_TECHNIQUES) & set(stack) else 1
    return 2 * least if {"fsdp", "hsdp"} & set(stack) and "tensor-parallel" in stack else least


def check(config: Config, folder: Path, data: Path, pool: ProcessPool | None = None, **options: str) -> None:
    """Train a run, and its rest again after its first checkpoint: all techniques are proved, and the bits are equal."""

    def trained(name: str, *, resume: bool = False) -> None:
        given = task("train", config, folder / name, data, resume=resume, **options)
        if pool is None:
            ACTIONS["train"](given)
        else:
            pool.run({name: given})

    trained("whole")
    killed_copy(folder / "whole", folder / "killed", step=1)
    trained("killed", resume=True)
    lines = [json.loads(line) for line in (folder / "killed" / "log.jsonl").read_text().splitlines()]
    for step in (1, 2):
        proved = {line["name"] for line in lines if line["kind"] == "technique" and line["step"] == step}
        assert proved == set(config.techniques), f"in step {step}"
    assert losses(folder / "killed") == losses(folder / "whole")
    assert difference(last_state(folder / "killed"), last_state(folder / "whole")) is None


def marks(number: int, stack: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.integration] if number == IN_MAKE_TEST else [pytest.mark.exhaustive]
    return found if processes(stack) == 1 else [*found, IN_ONE_WORKER]


@pytest.mark.parametrize(
    "stack", [pytest.param(each, marks=marks(number, each), id="+".join(each)) for number, each in enumerate(STACKS)]
)
def test_stack_is_proved_and_resumes_exactly(
    tmp_path: Path, data: Path, stack: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    config = with_techniques(CONFIG, settings(*stack))
    count = processes(stack)
    if count == 8:
        with ProcessPool(8, tmp_path / "pool") as pool:
            check(config, tmp_path, data, pool)
    else:
        pools = {1: None, 2: "two_processes", 4: "four_processes"}
        check(config, tmp_path, data, pools[count] and request.getfixturevalue(pools[count]))


@pytest.mark.exhaustive
@IN_ONE_WORKER
def test_fsdp_checkpoints_activations_of_compiled_code(tmp_path: Path, data: Path, two_processes: ProcessPool) -> None:
    """Hooks of the blocks run in plain Python only, for a few rows, and FSDP computes with weights of its own.

    Compiled code is traced, and computed in Python.

    The observed first step of a process exchanges the gradients of its batches as often as any other step.
    """
    stack = settings("fsdp", "compile", "activation-checkpointing")
    check(with_techniques(ONE_BLOCK, stack), tmp_path, data, two_processes, compile_by="eager")


@pytest.mark.exhaustive
@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("recipe", ["shakespeare-char-gpu", "gpt2-124m"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_defaults_of_a_gpu_recipe_are_proved_together_and_resume_exactly(
    tmp_path: Path, data: Path, recipe: str, optimizer: str
) -> None:
    config = ONE_BLOCK.changed({"optim.name": optimizer})
    check(with_techniques(config, settings(*defaults_here(recipe))), tmp_path, data)


def defaults_here(recipe: str) -> set[str]:
    found = set(get_recipe(recipe).default_techniques) & set(HERE)
    assert found >= {"compile", "fused-optimizer", "mixed-precision"}
    return found


def test_other_recipes_have_the_same_defaults() -> None:
    assert defaults_here("chatgot-85m") == defaults_here("gpt2-124m") > defaults_here("shakespeare-char-gpu")


def test_each_pair_without_a_conflict_is_in_a_stack_without_conflicts() -> None:
    covered = {pair for stack in STACKS for pair in combinations(stack, 2)}
    assert covered == ALLOWED
    assert len(HERE) >= 10 and len(PAIRS) > len(HERE) * (len(HERE) - 1) // 4, "too few can run here"
