"""The divergence guard: where a run stops, skipped updates and their limit, remedies, and exact resumption."""

from functools import partial
from pathlib import Path

import pytest

from chatgot.data.dataset import Dataset
from chatgot.loop import train
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.step import state
from chatgot.step.state import StepState
from tensorkeep.errors import DivergedError
from tensorkeep.testing.cases import case
from tiny_training import CONFIG, Witness, check_resumes_exactly, last_state, lines, poison, run

SKIPPING = CONFIG.changed({"loop.on_divergence": "skip", "loop.steps": 60})
LIMIT = 8


@pytest.fixture(autouse=True)
def few_may_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_SKIPPED", LIMIT)


def test_nonfinite_loss_stops_the_run_before_the_update_and_can_be_skipped(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"checkpoint.every": 3})
    with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        poison(opened, [8])
        with pytest.raises(DivergedError, match=r"step 8: the loss is inf.* on batches 7 to 7 ") as raised:
            train(opened, Witness())
        assert (raised.value.remedy or "").startswith("resume from step 6 with --resume --loop.on_divergence skip")
        assert all(parameter.isfinite().all() for parameter in opened.model.parameters())
    steps: list[int] = []

    def poison_again(opened: StepState) -> None:
        steps.append(opened.progress.step)
        poison(opened, [8])

    skipping = config.changed({"loop.on_divergence": "skip"})
    assert run(skipping, tmp_path / "run", data, resume=True, arrange=poison_again).reason == "done"
    assert steps == [6]
    assert last_state(tmp_path / "run")["progress"]["skipped"] == 1
    assert [line["step"] for line in lines(tmp_path / "run", "train") if line["loss"] is None] == [8]


def test_run_that_skips_too_many_updates_in_a_row_ends_with_an_error(tmp_path: Path, data: Path) -> None:
    witness = Witness()
    with pytest.raises(DivergedError, match="8 updates in a row, since step 1, were skipped") as raised:
        run(SKIPPING, tmp_path / "run", data, listener=witness, arrange=partial(poison, steps=range(60)))
    assert witness.of("train") == list(range(1, LIMIT))
    assert f"step {LIMIT}: the loss is inf" in str(raised.value)
    assert raised.value.remedy == "start a new run with a lower learning rate (--optim.lr)"


def test_error_names_the_checkpoints_before_and_amid_the_skipped_updates(tmp_path: Path, data: Path) -> None:
    before = "resume from step 4, the last checkpoint before them: tensorkeep train --out '{}' --resume"
    amid = "resume from step 8, saved while updates were skipped, with the same weights as before them"
    kept = "the last checkpoint before them is step 4"
    cases: dict[str, tuple[dict[str, object], str | None]] = {
        # Later losses do not improve, so no other step is saved.
        "none since": ({"eval.every": 4}, before),
        "later ones": ({"checkpoint.every": 4, "checkpoint.keep_last": 1}, None),
        "all of them": ({"checkpoint.every": 4, "checkpoint.keep_last": 99}, kept),
    }
    for name, (changes, remedy) in cases.items():
        with case(name):
            with pytest.raises(DivergedError, match="since step 5") as raised:
                run(SKIPPING.changed(changes), tmp_path / name, data, arrange=partial(poison, steps=range(5, 60)))
            found = raised.value.remedy or ""
            assert (amid in found) == ("checkpoint.every" in changes)
            assert ("step 4" in found) == (remedy is not None)
            assert (remedy or "").format(tmp_path / name) in found


def test_applied_update_resets_the_count_of_skipped_updates(tmp_path: Path, data: Path) -> None:
    bad = [step for step in range(18) if step % LIMIT]
    summary = run(SKIPPING.changed({"loop.steps": 18}), tmp_path / "run", data, arrange=partial(poison, steps=bad))
    assert (summary.reason, summary.step) == ("done", 18)
    assert last_state(tmp_path / "run")["progress"]["skipped"] == 15


def test_run_that_skips_updates_is_resumed_exactly_and_gives_up_at_the_same_step(tmp_path: Path, data: Path) -> None:
    config = SKIPPING.changed({"loop.steps": 12, "ema.decay": 0.9, "checkpoint.every": 3})
    check_resumes_exactly(config, tmp_path, data, stop_at=5, arrange=partial(poison, steps=[4, 5, 6, 9]))
    assert last_state(tmp_path / "whole")["progress"]["skipped"] == 4
    broken = partial(poison, steps=range(6, 60))
    run(SKIPPING, tmp_path / "run", data, arrange=broken, stop_at=9)
    with pytest.raises(DivergedError, match=r"step 13: .* since step 6,"):
        run(SKIPPING, tmp_path / "run", data, arrange=broken, resume=True)


def test_error_names_the_batches_of_the_step(tmp_path: Path, data: Path) -> None:
    for name, value, batches in (
        ("loop.gradient_accumulation_steps", 3, "12 to 14"),
        ("techniques.gradient-accumulation.batches", 3, "4 to 4"),
        ("techniques.loss-curriculum.candidates", 2, "8 to 9"),
    ):
        config = CONFIG.changed({"loop.steps": 60, name: value})
        with case(name):
            with pytest.raises(DivergedError, match=f"on batches {batches} of the data") as raised:
                run(config, tmp_path / name, data, arrange=partial(poison, steps=range(5, 6)))
            assert "--resume --loop.on_divergence skip" in (raised.value.remedy or "")
