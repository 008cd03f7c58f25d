"""`TensorkeepTrainer` against the real ``transformers``: it resumes exactly, and keeps and loads the best step."""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from ranks import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]
transformers = pytest.importorskip("transformers")

from tensorkeep.integrations.transformers import TensorkeepTrainer  # noqa: E402

ROWS = [{"input_ids": (row := (torch.arange(8) + start) % 11), "labels": row} for start in range(20)]


class Stop(transformers.TrainerCallback):
    """Ends the run like a kill, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer(out: Path, kind: Any = TensorkeepTrainer, accuracies: Iterator[float] | None = None, **options: Any) -> Any:
    """Return a trainer of a tiny GPT-2 with dropout: three epochs of five steps, or ``max_steps``."""
    transformers.set_seed(3)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    own = {name: options.pop(name) for name in ("callbacks", "manager", "processing_class") if name in options}
    if accuracies is not None:
        own |= {"eval_dataset": ROWS[:4], "compute_metrics": lambda _: {"accuracy": next(accuracies)}}
        options |= {"eval_strategy": "steps", "metric_for_best_model": "accuracy"}
    defaults = {"save_steps": 2, "logging_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    arguments = transformers.TrainingArguments(
        str(out), report_to=[], use_cpu=True, disable_tqdm=True, **{"max_steps": 8, **defaults, **options}
    )
    return kind(transformers.GPT2LMHeadModel(config), arguments, train_dataset=ROWS, **own)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )


@pytest.fixture(autouse=True)
def warnings_of_transformers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|torch|accelerate)\..*")
        yield


# After 5 steps the step before lies in the first epoch, after 3 and 7 in the middle of an epoch.
@pytest.mark.parametrize(
    "stopped_after", [5, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (3, 6, 7))]
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path: Path, stopped_after: int) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "killed", callbacks=[Stop(stopped_after)]).train()
    resumed = trainer(tmp_path / "killed")
    assert resumed.train(resume_from_checkpoint=True).global_step == 8
    assert same_weights(whole.model, resumed.model)
    steps = [tmp_path / run / "step-000008" for run in ("whole", "killed")]
    assert tensorkeep.diff(*steps).equal
    assert [step.number for step in resumed.manager.steps()] == [2, 4, 6, 8]
    assert resumed.manager.steps()[-1].metrics["loss"] > 0


def test_the_best_step_is_kept_and_loaded_and_a_finished_run_does_nothing(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "save_total_limit": 1, "max_steps": 8, "eval_steps": 2}
    first = trainer(tmp_path, accuracies=iter([0.1, 0.9, 0.2, 0.3]), **options)
    first.train(resume_from_checkpoint=True)
    kept = first.manager.steps()
    assert [step.number for step in kept] == [4, 8]
    assert first.manager.best().number == 4
    assert first.state.best_model_checkpoint == kept[0].path
    best = transformers.GPT2LMHeadModel.from_pretrained(kept[0].path)
    assert same_weights(first.model, best)
    assert kept[0].metrics["eval_accuracy"] == 0.9 and not any("runtime" in name for name in kept[0].metrics)
    assert not same_weights(best, transformers.GPT2LMHeadModel.from_pretrained(kept[1].path))

    again = trainer(tmp_path, accuracies=iter([]), **options)
    assert again.train(resume_from_checkpoint=True).global_step == 8
    assert again.manager.steps() == kept
    assert same_weights(again.model, best)


BEST = {"load_best_model_at_end": True, "eval_steps": 2}


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_finished_run_that_was_moved_or_copied_loads_its_own_best_step(tmp_path: Path, how: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    first = trainer(old, accuracies=iter([0.1, 0.9, 0.2, 0.3]), save_total_limit=1, **BEST)
    first.train()
    if how == "moved":
        old.rename(new)
    else:
        shutil.copytree(old, new)
        # The other run replaces its step by other weights.
        tensorkeep.save({"model": trainer(tmp_path / "any").model}, old / "step-000004", overwrite=True)
    again = trainer(new, accuracies=iter([]), save_total_limit=1, **BEST)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(new / "step-000004")
    assert same_weights(again.model, first.model)


def test_a_killed_run_that_was_moved_loads_and_keeps_its_best_step(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "old", accuracies=iter([0.9, 0.1]), callbacks=[Stop(5)], save_total_limit=1, **BEST).train()
    (tmp_path / "old").rename(tmp_path / "new")
    run = trainer(tmp_path / "new", accuracies=iter([0.2, 0.3]), save_total_limit=1, **BEST)
    run.train(resume_from_checkpoint=True)
    assert [step.number for step in run.manager.steps()] == [2, 8]
    assert same_weights(run.model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "new" / "step-000002"))


def test_a_best_step_that_is_lost_is_named_and_the_best_one_that_is_left_is_loaded(tmp_path: Path) -> None:
    trainer(tmp_path, accuracies=iter([0.1, 0.9, 0.5, 0.3]), **BEST).train()
    shutil.rmtree(tmp_path / "step-000004")
    run = trainer(tmp_path, accuracies=iter([]), **BEST)
    with pytest.warns(UserWarning, match=r"step-000004, is not in .*: step 6 is the best that is left"):
        run.train(resume_from_checkpoint=True)
    assert same_weights(run.model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "step-000006"))

    last = tmp_path / "last"
    last.mkdir()
    (tmp_path / "step-000008").rename(last / "step-000008")
    run = trainer(tmp_path / "new", accuracies=iter([]), **BEST)
    with pytest.warns(UserWarning, match=r"is not in .*last: no other step has the metric"):
        run.train(resume_from_checkpoint=last / "step-000008")
    assert run.state.best_model_checkpoint is None
    assert same_weights(run.model, transformers.GPT2LMHeadModel.from_pretrained(last / "step-000008"))


def test_a_run_that_goes_on_in_another_folder_does_not_take_the_steps_there_for_its_own(tmp_path: Path) -> None:
    one = trainer(tmp_path / "one", accuracies=iter([0.1, 0.9, 0.2, 0.3]), **BEST)
    one.train()
    trainer(tmp_path / "two", accuracies=iter([0.1, 0.2]), learning_rate=0.1, max_steps=4, **BEST).train()
    run = trainer(tmp_path / "two", accuracies=iter([0.4]), max_steps=10, **BEST)
    run.train(resume_from_checkpoint=tmp_path / "one" / "step-000008")
    assert run.state.best_model_checkpoint == str(tmp_path / "one" / "step-000004")
    assert same_weights(run.model, one.model)


def test_the_best_step_before_a_kill_is_kept_after_it(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "save_total_limit": 1, "eval_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, accuracies=iter([0.9, 0.1]), callbacks=[Stop(5)], **options).train()
    resumed = trainer(tmp_path, accuracies=iter([0.2, 0.3]), **options)
    resumed.train(resume_from_checkpoint=True)
    assert [step.number for step in resumed.manager.steps()] == [2, 8]
    assert same_weights(resumed.model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "step-000002"))


def test_the_best_step_that_was_saved_is_loaded_if_a_better_one_was_not(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "eval_steps": 2, "save_steps": 4}
    run = trainer(tmp_path / "run", accuracies=iter([0.1, 0.5, 0.9, 0.2]), save_total_limit=1, **options)
    with pytest.warns(UserWarning, match="step 6, which is the best, was not loaded"):
        run.train()
    assert [step.number for step in run.manager.steps()] == [4, 8]
    assert run.state.best_model_checkpoint == str(tmp_path / "run" / "step-000004")
    assert same_weights(run.model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "step-000004"))


def test_the_best_checkpoint_of_the_plain_trainer_is_loaded_after_a_resume(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "eval_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, transformers.Trainer, iter([0.9, 0.1]), callbacks=[Stop(5)], **options).train()
    run = trainer(tmp_path, accuracies=iter([0.2, 0.3]), **options)
    run.train(resume_from_checkpoint=True)
    assert same_weights(run.model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2"))


def test_a_limit_of_zero_is_no_limit(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_total_limit=0)
    run.train()
    assert [step.number for step in run.manager.steps()] == [2, 4, 6, 8]


def test_a_run_of_epochs_that_is_finished_does_nothing(tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 1.5, "save_strategy": "epoch"}
    first = trainer(tmp_path, **options)
    assert first.train(resume_from_checkpoint=True).global_step == 8
    steps = first.manager.steps()
    again = trainer(tmp_path, **options)
    assert again.train(resume_from_checkpoint=True).global_step == 8
    assert again.manager.steps() == steps and steps[-1].number == 8
    assert same_weights(first.model, again.model)


def test_a_damaged_step_is_skipped_and_replaced(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    weights = tmp_path / "step-000008" / "model.safetensors"
    weights.write_bytes(bytes([*weights.read_bytes()[:-1], 7]))
    with pytest.warns(UserWarning, match="step-000008 is skipped") as of_the_manager:
        tensorkeep.CheckpointManager(tmp_path).restore()
    with pytest.warns(UserWarning, match="step-000008 is skipped") as caught:
        resumed = trainer(tmp_path)
        resumed.train(resume_from_checkpoint=True)
    assert [str(each.message) for each in caught] == [f"{of_the_manager[0].message}\nthe run resumes after step 6"]
    assert same_weights(whole.model, resumed.model)
    assert tensorkeep.verify(tmp_path / "step-000008").ok


def test_a_run_says_where_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, expected in (
        (2, f"no step in {tmp_path}: starting from the beginning"),
        (4, "resuming after step 2"),
        (4, "the run is finished at step 4: nothing to train"),
    ):
        trainer(tmp_path, max_steps=steps).train(resume_from_checkpoint=True)
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if not line.startswith("{")] == [expected]


def test_incomplete_steps_are_named_and_without_another_one_the_run_begins_again(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=4).train()
    for step in (2, 4):
        weights = tmp_path / f"step-00000{step}" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is skipped") as caught:
        trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    texts = [str(each.message) for each in caught if "is skipped" in str(each.message)]
    assert [text.partition(":")[0] for text in texts] == ["step-000002 is skipped", "step-000004 is skipped"]
    assert all(text.endswith("\nthe run starts from the beginning") for text in texts)


def test_a_run_that_begins_again_in_its_folder_warns_once_before_it_trains(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=6).train()

    class Looks(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **rest: Any) -> None:
            seen.extend(caught)

    seen: list[Any] = []
    run = trainer(tmp_path, callbacks=[Looks()], max_steps=4, save_total_limit=2)
    with pytest.warns(UserWarning, match="steps already, up to step 6") as caught:
        run.train()
    texts = [str(each.message) for each in caught if "step" in str(each.message)]
    assert texts == [str(each.message) for each in seen] and len(texts) == 1
    assert "resume_from_checkpoint=True" in texts[0] and "output_dir" in texts[0]
    with warnings.catch_warnings(action="error", category=UserWarning):
        trainer(tmp_path / "empty", max_steps=2).train()


def test_a_checkpoint_of_the_plain_trainer_is_resumed(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", transformers.Trainer)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "killed", transformers.Trainer, callbacks=[Stop(5)]).train()
    resumed = trainer(tmp_path / "killed")
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(whole.model, resumed.model)
    assert [step.number for step in resumed.manager.steps()] == [6, 8]


def test_a_step_has_the_tokenizer_and_only_weights_if_asked(tmp_path: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_letters(), unk_token="a", pad_token="b")
    with tensorkeep.CheckpointManager(tmp_path, keep_last=1) as manager:
        run = trainer(tmp_path, manager=manager, processing_class=tokenizer, save_only_model=True, max_steps=4)
        run.train()
    [step] = manager.steps()
    assert transformers.AutoTokenizer.from_pretrained(step.path)("ab")["input_ids"] == [0, 1]
    assert {name.partition(".")[0] for name in tensorkeep.open(step.path)} == {"model"}


def _letters() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    found = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("abcdefghijk")}, unk_token="a"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return found


def test_what_has_no_effect_or_no_support_is_named(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedError, match="push_to_hub"):
        trainer(tmp_path, push_to_hub=True, hub_token="none")
    with pytest.warns(UserWarning, match="save_total_limit has no effect"):
        trainer(tmp_path, manager=tensorkeep.CheckpointManager(tmp_path), save_total_limit=3)
    with pytest.raises(tensorkeep.UnsupportedError, match="hyperparameter search"):
        trainer(tmp_path)._save_checkpoint(None, {"trial": 1})


def train_on_a_rank(out: Path, stopped_after: int | None = None) -> list[Any]:
    from torch import distributed as dist

    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("LOCAL_RANK", str(dist.get_rank()))
        run = trainer(out, callbacks=[] if stopped_after is None else [Stop(stopped_after)], save_total_limit=2)
        with contextlib.suppress(KeyboardInterrupt):
            run.train(resume_from_checkpoint=True)
        return [run.args.world_size, *(parameter.tolist() for parameter in run.model.parameters())]


@pytest.mark.exhaustive
def test_one_process_resumes_what_two_ranks_have_saved(tmp_path: Path) -> None:
    run_ranks(2, train_on_a_rank, tmp_path, 5)
    run = trainer(tmp_path)
    with pytest.warns(tensorkeep.StateMismatchWarning, match="rng.1"):
        assert run.train(resume_from_checkpoint=True).global_step == 8


@pytest.mark.exhaustive
def test_a_killed_run_of_two_ranks_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_ranks(2, train_on_a_rank, tmp_path / "whole")
    run_ranks(2, train_on_a_rank, tmp_path / "killed", 5)
    assert run_ranks(2, train_on_a_rank, tmp_path / "killed") == whole
    assert whole[0][0] == 2
    steps = [tmp_path / run / "step-000008" for run in ("whole", "killed")]
    assert tensorkeep.diff(*steps, select=["model.*", "optimizer.*", "rng.*"]).equal
    assert tensorkeep.verify(steps[1]).ok and (steps[1] / "config.json").is_file()
    assert sorted(tensorkeep.load(steps[1])["rng"]) == ["0", "1"]
