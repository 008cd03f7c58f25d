"""Activation checkpointing recomputes the same bits, together with each other technique."""

from pathlib import Path
from typing import Any

import pytest

from chatgot.data.prepare import prepare
from chatgot.testing import TINY, train_run, with_techniques
from tiers import exhaustive
from tiny_training import check_same


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare documents of different lengths."""
    texts = tmp_path_factory.mktemp("documents")
    for number in range(50):
        (texts / f"{number:02d}.txt").write_text("the quick brown fox jumps over the lazy dog"[number % 7 :])
    return prepare(texts, tmp_path_factory.mktemp("data") / "prepared", tokenizer="char").path


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("activation-function", {"activation": "swiglu"}),
        *exhaustive(("lr-range-test", {}), ("lr-plateau", {}), ("progressive-length", {}), ("length-curriculum", {})),
        *exhaustive(("loss-curriculum", {}), ("sparse-attention", {"block": 4, "keep": 2})),
        ("quantised-forward", {}),
    ],
)
def test_recomputed_blocks_are_bit_identical(tmp_path: Path, data: Path, name: str, settings: dict[str, Any]) -> None:
    alone = with_techniques(TINY.changed({"loop.steps": 2}), {name: settings})
    train_run(alone, tmp_path / "alone", data)
    train_run(with_techniques(alone, {"activation-checkpointing": {}}), tmp_path / "both", data)
    check_same(tmp_path / "both", tmp_path / "alone", "train", "evaluate")
