"""Activation checkpointing recomputes the same bits, together with each other technique."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.testing.equality import difference
from tensorkeep.testing.technique_suite import TINY, last_state, losses, train_run, with_techniques
from tensorkeep.train.data.prepare import prepare
from tiers import exhaustive


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare documents of different lengths."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "texts").mkdir()
    for number in range(50):
        (folder / "texts" / f"{number:02d}.txt").write_text("the quick brown fox jumps over the lazy dog"[number % 7 :])
    prepare(folder / "texts", folder / "prepared", tokenizer="char")
    return folder / "prepared"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("activation-function", {"activation": "swiglu"}),
        *exhaustive(("lr-range-test", {}), ("lr-plateau", {}), ("progressive-length", {}), ("length-curriculum", {})),
        *exhaustive(("loss-curriculum", {}), ("sparse-attention", {"block": 4, "keep": 2})),
        ("quantised-forward", {}),
    ],
)
def test_recomputed_blocks_are_bit_identical(
    tmp_path: Path, data: Path, name: str, settings: Mapping[str, Any]
) -> None:
    alone = with_techniques(TINY.changed({"loop.steps": 2}), {name: settings})
    train_run(alone, tmp_path / "alone", data)
    train_run(with_techniques(alone, {"activation-checkpointing": {}}), tmp_path / "both", data)
    assert losses(tmp_path / "both") == losses(tmp_path / "alone")
    assert difference(last_state(tmp_path / "both"), last_state(tmp_path / "alone")) is None
