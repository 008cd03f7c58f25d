"""The divergence guard with skipped updates: the limit, the error at the end, and exact resumption."""

from functools import partial
from pathlib import Path

import pytest

from tensorkeep.errors import DivergedError
from tensorkeep.testing.equality import difference
from tensorkeep.train.guard import MOST_SKIPPED
from train.tiny_training import CONFIG, Witness, last_state, lines, poison, run

SKIPPING = CONFIG.changed({"loop.on_divergence": "skip", "loop.steps": 60})
ALWAYS = range(1000)


def test_run_that_skips_too_many_updates_in_a_row_ends_with_an_error(tmp_path: Path, data: Path) -> None:
    witness = Witness()
    with pytest.raises(DivergedError, match="20 updates in a row, since step 1, were skipped") as raised:
        run(SKIPPING, tmp_path / "run", data, listener=witness, arrange=partial(poison, steps=ALWAYS))
    assert witness.of("train") == list(range(1, MOST_SKIPPED))
    assert f"step {MOST_SKIPPED}: the loss is inf" in str(raised.value)
    assert raised.value.remedy == "start a new run with a lower learning rate (--optim.lr)"


def test_error_names_the_last_checkpoint_before_the_skipped_updates(tmp_path: Path, data: Path) -> None:
    config = SKIPPING.changed({"eval.every": 4})  # later losses do not improve, so no other step is saved
    with pytest.raises(DivergedError, match="since step 5") as raised:
        run(config, tmp_path / "my run", data, arrange=partial(poison, steps=range(5, 60)))
    assert (raised.value.remedy or "").endswith(
        f"resume from step 4, the last checkpoint before them: tensorkeep train --out '{tmp_path / 'my run'}' --resume"
    )


@pytest.mark.parametrize("keep_last", [2, 99])
def test_error_explains_that_later_checkpoints_are_usable(tmp_path: Path, data: Path, keep_last: int) -> None:
    config = SKIPPING.changed({"checkpoint.every": 4, "checkpoint.keep_last": keep_last})
    with pytest.raises(DivergedError) as raised:
        run(config, tmp_path / "run", data, arrange=partial(poison, steps=range(6, 60)))
    remedy = raised.value.remedy or ""
    assert "resume from step 24, saved while updates were skipped, with the same weights as before them" in remedy
    assert ("the last checkpoint before them is step 4" in remedy) == (keep_last == 99)


def test_applied_update_resets_the_count_of_skipped_updates(tmp_path: Path, data: Path) -> None:
    bad = [step for step in range(60) if step % MOST_SKIPPED]
    summary = run(SKIPPING, tmp_path / "run", data, arrange=partial(poison, steps=bad))
    assert (summary.reason, summary.step) == ("done", 60)
    assert last_state(tmp_path / "run")["progress"]["skipped"] == 57


def test_run_that_skips_updates_is_resumed_exactly(tmp_path: Path, data: Path) -> None:
    config = SKIPPING.changed({"loop.steps": 12, "ema.decay": 0.9, "checkpoint.every": 3})
    broken = partial(poison, steps=[4, 5, 6, 9])
    run(config, tmp_path / "whole", data, arrange=broken)
    run(config, tmp_path / "parts", data, arrange=broken, stop_at=5)
    run(config, tmp_path / "parts", data, arrange=broken, resume=True)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None
    assert last_state(tmp_path / "whole")["progress"]["skipped"] == 4


def test_resumed_run_gives_up_at_the_same_step(tmp_path: Path, data: Path) -> None:
    broken = partial(poison, steps=range(6, 60))
    run(SKIPPING, tmp_path / "run", data, arrange=broken, stop_at=13)
    with pytest.raises(DivergedError, match=r"step 25: .* since step 6,"):
        run(SKIPPING, tmp_path / "run", data, arrange=broken, resume=True)


def test_run_that_stops_at_the_first_divergence_names_the_last_checkpoint(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"checkpoint.every": 3})
    with pytest.raises(DivergedError, match="step 8: ") as raised:
        run(config, tmp_path / "run", data, arrange=partial(poison, steps=[8]))
    assert (raised.value.remedy or "").startswith("resume from step 6 with --resume --loop.on_divergence skip")


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"loop.accumulate": 3}, "12 to 14"),
        ({"techniques.gradient-accumulation.batches": 3}, "4 to 4"),
        ({"techniques.loss-curriculum.candidates": 2}, "8 to 9"),
    ],
    ids=["accumulated", "in parts", "chosen"],
)
def test_error_names_the_batches_of_the_step(
    tmp_path: Path, data: Path, changes: dict[str, object], batches: str
) -> None:
    config = CONFIG.changed({"loop.steps": 60, **changes})
    with pytest.raises(DivergedError, match=f"on batches {batches} of the data") as raised:
        run(config, tmp_path / "run", data, arrange=partial(poison, steps=range(5, 6)))
    assert "--resume --loop.on_divergence skip" in (raised.value.remedy or "")
