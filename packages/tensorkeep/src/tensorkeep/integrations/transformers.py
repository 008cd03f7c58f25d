"""`TensorkeepTrainer`: a ``transformers.Trainer`` that saves its checkpoints with a `CheckpointManager`."""

import dataclasses
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn

from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.stateful import RandomState
from tensorkeep.checkpoint.verify import error_of, verify
from tensorkeep.distributed import PerRank
from tensorkeep.errors import UnsupportedError, UsageError, skipped, warn_caller
from tensorkeep.formats.native.directory import is_native, is_ours
from tensorkeep.integrations import requires
from tensorkeep.manager import CheckpointManager
from tensorkeep.paths import StorePath
from tensorkeep.runs.retention import Keep
from tensorkeep.runs.steps import Step, best_step

with requires("transformers>=5.3"):
    from transformers import Trainer
    from transformers.trainer_callback import ExportableState, TrainerState
    from transformers.trainer_utils import get_last_checkpoint

    if not (hasattr(Trainer, "_run_epoch") and hasattr(Trainer, "_init_training_state")):
        raise ImportError("the installed version is older")

__all__ = ["TensorkeepTrainer"]

logger = logging.getLogger(__name__)
TRAINER_STATE = "trainer_state.json"


class KeepNamedBest(Keep):
    """Keeps the best step that each of the last ``count`` steps names, so that a resumed run finds it.

    ``best`` has every step that was saved, with the best step that was saved until then.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.best: dict[int, int | None] = {}

    def wanted(self, steps: Sequence[Step]) -> set[int]:
        return {best for step in steps[-self._count :] if (best := self.best.get(step.number)) is not None}


class TensorkeepTrainer(Trainer):
    """A ``Trainer`` whose checkpoints are steps of a `tensorkeep.CheckpointManager`; also with DDP.

    Takes the arguments of ``transformers.Trainer``. ``save_strategy``, ``save_steps``, ``save_total_limit``,
    ``metric_for_best_model`` and ``load_best_model_at_end`` work as before. A save blocks the training only while the
    state is copied, a step becomes visible completely or not at all, and nothing is pickled. A resumed run has the
    weights of a run that was never interrupted.

    ``train(resume_from_checkpoint=True)`` resumes from the last undamaged step, and starts from the beginning without
    one. It does nothing for a run that is finished. ``train(resume_from_checkpoint=PATH)`` also takes a
    ``checkpoint-N`` folder of a plain ``Trainer``.

    Each step has ``config.json``, ``trainer_state.json`` and the files of the tokenizer beside its weights, so that
    ``AutoModelForCausalLM.from_pretrained("output/step-000500")`` opens it. Steps that are compressed or incremental,
    and steps of many ranks, have to be converted first (``tensorkeep convert``).

    Parameters
    ----------
    manager : tensorkeep.CheckpointManager, optional
        Saves the steps; its rules decide which steps are kept. By default a manager of ``output_dir`` that keeps
        the last ``save_total_limit`` steps and the best step.

    Raises
    ------
    UnsupportedError
        With DeepSpeed, FSDP, ``push_to_hub`` or a hyperparameter search.
    UsageError
        If the manager's folder is in an object store.

    Examples
    --------
    >>> import tempfile, torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    >>> from tensorkeep.integrations.transformers import TensorkeepTrainer
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    >>> rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    >>> arguments = TrainingArguments(
    ...     folder.name, max_steps=2, save_steps=1, save_total_limit=1, use_cpu=True, report_to=[], disable_tqdm=True
    ... )
    >>> trainer = TensorkeepTrainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
    >>> trainer.train(resume_from_checkpoint=True).global_step  # doctest: +ELLIPSIS
    no step in ...: starting from the beginning
    {...}
    2
    >>> [step.number for step in trainer.manager.steps()]
    [2]
    >>> folder.cleanup()
    """

    def __init__(self, *args: Any, manager: CheckpointManager | None = None, **options: Any) -> None:
        arguments = options.get("args", args[1] if len(args) > 1 else None)
        # Before the Trainer asks the hub for the repository.
        self._refuse(push_to_hub=arguments is not None and arguments.push_to_hub)
        super().__init__(*args, **options)
        self._refuse(DeepSpeed=self.is_deepspeed_enabled, FSDP=self.is_fsdp_enabled)
        self._group = dist.group.WORLD if self.args.world_size > 1 else None
        limit = self.args.save_total_limit
        if limit is not None and limit <= 0:
            limit = None  # as in the Trainer
        self._named_best = KeepNamedBest(limit or 1)
        self._resumed: TrainerState | None = None
        metric = self.args.metric_for_best_model
        self._best_rule = (
            (None, None)
            if metric is None
            else (f"eval_{metric.removeprefix('eval_')}", "max" if self.args.greater_is_better else "min")
        )
        if manager is None:
            manager = CheckpointManager(
                self.args.output_dir,
                keep_last=limit,
                keep=None if limit is None else self._named_best,
                metric=self._best_rule[0],
                mode=self._best_rule[1],
                group=self._group,
            )
        elif limit is not None:
            warn_caller("save_total_limit has no effect beside manager=: give keep_last to the manager")
        if isinstance(manager.root, StorePath):
            text = "the Trainer reads its state from a folder of a disk"
            raise UsageError(text, path=manager.root, remedy="give a manager of a local folder")
        self.manager = manager

    @staticmethod
    def _refuse(**uses: bool) -> None:
        for name in (name for name, is_used in uses.items() if is_used):
            remedy = "push the model after the training" if name == "push_to_hub" else "use transformers.Trainer"
            raise UnsupportedError(f"TensorkeepTrainer does not support {name}", remedy=remedy)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train; see ``transformers.Trainer.train``. All steps are durable when this returns."""
        is_given = bool(resume_from_checkpoint) and resume_from_checkpoint is not True
        if resume_from_checkpoint is True:
            # Without any checkpoint, so that a job that is queued again needs one command.
            resume_from_checkpoint = self._last_step() or get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                self._print(f"no step in {self.manager.root}: starting from the beginning")
        elif resume_from_checkpoint:
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        elif self.args.process_index == 0:
            self._warn_of_earlier_run()
        saved = self._named_best.best
        saved.clear()
        self._resumed = self._state_of(resume_from_checkpoint) if resume_from_checkpoint else None
        if self._resumed is not None and _is_step(resume_from_checkpoint):
            last = self._resumed.global_step
            # Steps beside another run's step, which this run continues, are not its own.
            if self._is_ours(resume_from_checkpoint):
                saved |= {step.number: None for step in self.manager.steps() if step.number <= last}
            saved[last] = _number(self._resumed.best_model_checkpoint)
        # Of those that are later than a given path the manager warns.
        self.manager._warns_of_later = is_given
        try:
            with self.manager:
                found = super().train(resume_from_checkpoint or None, *args, **options)
        finally:
            self.manager._warns_of_later = True
        best = self.state.best_global_step
        if self.args.load_best_model_at_end and best not in (None, _number(self.state.best_model_checkpoint)):
            warn_caller(f"the model of step {best}, which is the best, was not loaded: it was evaluated, but not saved")
        return found

    def _warn_of_earlier_run(self) -> None:
        listing = self.manager.listing()
        if numbers := [*(step.number for step in listing.steps), *listing.broken]:
            warn_caller(
                f"{self.manager.root} has steps already, up to step {max(numbers)}, and this run starts from the "
                "beginning: it replaces steps of the same number, and its rules may delete others\n"
                "give train(resume_from_checkpoint=True) to resume after the last step, or another output_dir"
            )

    def _last_step(self) -> str | None:
        found: list[str | None] = [None]
        if self.args.process_index == 0:
            # Verified first, because the Trainer restores the parts one after another.
            listing = self.manager.listing()
            broken, instead = dict(listing.broken), "the run starts from the beginning"
            for step in reversed(listing.steps):
                report = verify(step.path)
                if report.ok:
                    found, instead = [step.path], f"the run resumes after step {step.number}"
                    broken = {number: error for number, error in broken.items() if number > step.number}
                    break
                broken[step.number] = error_of(report)
            if found[0] is None and (plain := get_last_checkpoint(self.args.output_dir)):
                instead = f"the run resumes from {plain}"
            for number, error in sorted(broken.items()):
                warn_caller(f"{skipped(f'step-{number:06d}', error)}\n{instead}")
        if self._group is not None:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _is_ours(self, checkpoint: str) -> bool:
        return Path(checkpoint).parent.resolve() == Path(self.manager.root).resolve()

    def _state_of(self, checkpoint: str) -> TrainerState | None:
        """Return the state of the Trainer in a checkpoint; its best checkpoint is one that lies beside it now.

        The stored path is absolute. After the run was moved or copied it names nothing, or the step of another run.
        """
        path = os.path.join(checkpoint, TRAINER_STATE)
        if not os.path.isfile(path):
            return None
        state = TrainerState.load_from_json(path)
        if (named := state.best_model_checkpoint) is None:
            return state
        folders = [Path(checkpoint).absolute().parent]
        if self._is_ours(checkpoint):
            folders = [Path(self.manager.root), Path(self.args.output_dir).absolute()]
        # The best step that was evaluated, unless it was not saved: then the best one that was.
        for number in (state.best_global_step, _number(named)):
            names = () if number is None else (f"step-{number:06d}", f"checkpoint-{number}")
            for found in (folder / name for name in names for folder in folders):
                if _is_step(found) or (found / TRAINER_STATE).is_file():
                    state.best_model_checkpoint = str(found)
                    return state
        best = self._best_left(state.global_step) if self._is_ours(checkpoint) else None
        # Also the metric: else a later step would have to be better than one that is lost.
        state.best_model_checkpoint = None if best is None else best.path
        state.best_global_step = None if best is None else best.number
        state.best_metric = None if best is None else best.metrics[str(self._best_rule[0])]
        if self.args.process_index == 0:
            instead = "no other step has the metric" if best is None else f"step {best.number} is the best that is left"
            warn_caller(f"the best checkpoint, {os.path.basename(named)}, is not in {folders[0]}: {instead}")
        return state

    def _best_left(self, last: int) -> Step | None:
        metric, mode = self._best_rule
        steps = [step for step in self.manager.steps() if step.number <= last and metric in step.metrics]
        return best_step(steps, metric, mode) if steps else None

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> Any:
        lengths = max_steps, num_update_steps_per_epoch, num_train_epochs
        if self._resumed is None:
            return super()._init_training_state(*lengths, resume_from_checkpoint, trial)
        # It reads only the state from the folder: here the one with the path of the best checkpoint as it is now.
        with tempfile.TemporaryDirectory() as folder:
            self._resumed.save_to_json(os.path.join(folder, TRAINER_STATE))
            found = super()._init_training_state(*lengths, folder, trial)
        step = self.state.global_step
        is_finished = step >= max_steps
        self._print(
            f"the run is finished at step {step}: nothing to train" if is_finished else f"resuming after step {step}"
        )
        return found

    def _print(self, text: str) -> None:
        # Printed like the losses: the Trainer's logger shows warnings only.
        if self.is_world_process_zero():
            print(text, flush=True)

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        # The Trainer looks at the number of the step only after one more step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **options)

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._refuse(**{"a hyperparameter search": trial is not None or self.hp_search_backend is not None})
        self.store_flos()
        step, saved = self.state.global_step, self._named_best.best
        saved[step] = None
        # A best step that is not saved leaves the best one before it, as in the Trainer.
        if self.state.best_global_step in saved:
            self.state.best_model_checkpoint = os.path.join(
                self.manager.root, f"step-{self.state.best_global_step:06d}"
            )
        saved[step] = _number(self.state.best_model_checkpoint)
        state: dict[str, Any] = {"model": self.model, "step": step}
        if not self.args.save_only_model:
            state |= {**self._stateful(), "rng": self._random()}
        # The Trainer replaces a checkpoint of the same number, too.
        self.manager.save(step, state, metrics=self._metrics(), overwrite=True, files=self._files())

    def _stateful(self) -> dict[str, Any]:
        found = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "scaler": self.accelerator.scaler}
        return {name: value for name, value in found.items() if value is not None}

    def _random(self) -> Any:
        return {"0": RandomState()} if self._group is None else PerRank(RandomState())

    def _metrics(self) -> dict[str, float]:
        """Return the last logged loss, and what was evaluated after this step, without durations and rates."""
        found: dict[str, float] = {}
        for entry in self.state.log_history:
            is_now = entry["step"] == self.state.global_step
            found |= {key: entry[key] for key in entry if key == "loss" or (is_now and _is_metric(key, entry[key]))}
        return found

    def _files(self) -> dict[str, str | bytes]:
        """Return what ``from_pretrained`` and the Trainer read beside the weights."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        exported = [each for each in callbacks if isinstance(each, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
        described = [getattr(self.model, name, None) for name in ("config", "generation_config")]
        with tempfile.TemporaryDirectory() as folder:
            for each in (*described, self.processing_class):
                if hasattr(each, "save_pretrained"):
                    each.save_pretrained(folder)
            found = [path for path in Path(folder).iterdir() if path.is_file()]
            files: dict[str, str | bytes] = {path.name: path.read_bytes() for path in found if is_ours(path.name)}
        if left_out := sorted(path.name for path in found if path.name not in files):
            warn_caller(f"these files of the tokenizer are not saved with the steps: {', '.join(left_out)}")
        return {**files, TRAINER_STATE: json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)}

    # Loading: the Trainer calls these one after another.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not _is_step(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load(resume_from_checkpoint, {"model": self.model if model is None else model})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_step(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._load(checkpoint, self._stateful())

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_step(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_step(checkpoint):
            super()._load_rng_state(checkpoint)
        else:
            # Not strict: one process resumes what several have saved. A warning names the states that it leaves.
            self._load(checkpoint, {"rng": self._random()}, strict=False)

    def _load_best_model(self) -> None:
        self.manager.wait()
        if not _is_step(self.state.best_model_checkpoint):
            super()._load_best_model()
        else:
            self._load(self.state.best_model_checkpoint, {"model": self.model})

    def _load(self, path: str, state: dict[str, Any], *, strict: bool = True) -> None:
        load(path, into=state, group=self._group, strict=strict)


def _is_step(path: str | Path) -> bool:
    return is_native(Path(path))


def _number(path: str | None) -> int | None:
    """Return the step of ``step-000500`` or ``checkpoint-500``."""
    match = re.search(r"-(\d+)$", path or "")
    return int(match[1]) if match else None


def _is_metric(name: str, value: object) -> bool:
    is_time = name.endswith(("_runtime", "_per_second", "_time"))
    return name.startswith("eval_") and isinstance(value, int | float) and not is_time
