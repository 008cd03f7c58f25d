"""The loss on a text: every token once, whatever the batches, the processes and the length of the last window."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatgot.data.batches import EvaluationWindows
from chatgot.loop import validation_loss
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT, IGNORED, token_loss
from chatgot.run.data import validation_windows
from chatgot.step.train_step import evaluate
from chatgot.testing import opened
from tiny_training import CONFIG


def targets_of(windows: EvaluationWindows, rows: int, parts: int) -> list[list[int]]:
    """Return the targets that each part counts."""
    found = []
    for part in range(parts):
        batches = list(windows.batches(rows, part=part, parts=parts))
        assert all(inputs.shape == targets.shape for inputs, targets in batches)
        # A row has ended after its first target that does not count.
        for _, targets in batches:
            assert (targets[(targets == IGNORED).cumsum(dim=1) > 0] == IGNORED).all()
        found.append([int(each) for _, targets in batches for each in targets.flatten() if each != IGNORED])
    return found


@given(length=st.integers(2, 60), context=st.integers(1, 9), rows=st.integers(1, 7), parts=st.integers(1, 4))
def test_every_token_is_a_target_once(length: int, context: int, rows: int, parts: int) -> None:
    windows = EvaluationWindows(np.arange(length, dtype=np.uint16), context)
    found = targets_of(windows, rows, parts)
    assert sorted(chain.from_iterable(found)) == list(range(1, length))
    assert windows.targets == length - 1
    shapes = [[inputs.shape for inputs, _ in windows.batches(rows, part=part, parts=parts)] for part in range(parts)]
    # Processes that gather weights or compile need equal batches, and equally many.
    assert len({shape for each in shapes for shape in each}) == 1
    assert len({len(each) for each in shapes}) == 1
    assert shapes[0][0][0] <= rows


@given(length=st.integers(2, 60), context=st.integers(1, 9), most=st.integers(1, 80), rows=st.integers(1, 7))
def test_a_part_of_the_tokens_is_spread_over_the_text(length: int, context: int, most: int, rows: int) -> None:
    windows = EvaluationWindows(np.arange(length, dtype=np.uint16), context, most=most)
    (found,) = targets_of(windows, rows, 1)
    assert len(found) == len(set(found)) == windows.targets
    assert windows.targets <= min(length - 1, most + context - 1)
    assert windows.targets >= min(length - 1, most) - (context - 1)
    begins = [each for each in range(1, length, context) if each in found]
    gaps = np.diff(begins)
    assert gaps.size == 0 or gaps.max() - gaps.min() <= context


def test_loss_is_the_mean_over_all_tokens_for_any_batches() -> None:
    model = GPT(ModelConfig(vocab_size=11, context_length=8, n_layers=1, n_heads=1, d_model=8, dropout=0.3))
    text = np.random.default_rng(0).integers(0, 11, 61).astype(np.uint16)
    windows = EvaluationWindows(text, 8)
    model.eval()
    expected = 0.0
    with torch.no_grad():
        for number in range(len(windows)):
            inputs, targets = (each.unsqueeze(0) for each in windows.pair(number))
            expected += float(token_loss(model(inputs), targets)) * inputs.shape[1] / 60
    model.train()
    before = torch.get_rng_state()
    for rows in (1, 3, 64):
        assert evaluate(model, windows.batches(rows)) == pytest.approx(expected, rel=1e-6)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    # Some processes have a batch without targets, where windows cannot be divided equally: it counts nothing.
    batch = next(iter(windows.batches(1)))
    empty = (torch.zeros_like(batch[0]), torch.full_like(batch[1], IGNORED))
    assert evaluate(model, [batch, empty]) == evaluate(model, [batch])


def test_run_evaluates_the_tokens_of_its_settings(tmp_path: Path, data: Path) -> None:
    for name, changes in {"all": {}, "some": {"eval.tokens": 40}, "batches": {"eval.batches": 1}}.items():
        with opened(CONFIG.changed(changes), tmp_path / name, data) as run:
            windows, total = validation_windows(run.config, run.dataset), len(run.dataset.validation) - 1
            # A batch of eval.batches has up to 16,384 tokens.
            assert windows.targets == (3 * 16 if name == "some" else total)
            expected = evaluate(run.model, windows.batches(1))
            assert validation_loss(run) == pytest.approx(expected, rel=1e-6)


def test_evaluation_computes_in_the_precision_of_the_run(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"techniques.mixed-precision.dtype": "bf16"})
    with opened(config, tmp_path / "run", data) as run:
        seen: set[torch.dtype] = set()
        for block in run.model.blocks:
            block.mlp.up.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))  # type: ignore[union-attr]
        validation_loss(run)
        assert seen == {torch.bfloat16}
        inputs, targets = next(run.batches)
        with torch.no_grad():
            assert run.operations.evaluate(inputs, targets).dtype == torch.float32
