"""The log of a run, one JSON object per line, and the experiment trackers that receive its figures."""

import json
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from chatgot.config.config import LogConfig, flat
from chatgot.run.folder import RunFolder
from tensorkeep.errors import StoreError, first_line, import_extra
from tensorkeep.ext.checkpoint import lines_of
from tensorkeep.ext.storage import replace_file, store_errors

logger = logging.getLogger(__name__)

# Seconds between two requests to an MLflow server, which each take a while.
_SECONDS_BETWEEN = 5.0
# MLflow's limit on the parameters of a request; that on metrics is larger.
_LARGEST_BATCH = 100
# Characters that MLflow refuses in names. Patterns of parameter groups contain them.
_NOT_IN_NAMES = re.compile(r"[^\w/ .:-]")


class Tracker(ABC):
    """Receives the figures of a run, on rank 0. Remote trackers may fail while the run continues.

    Raises MissingExtraError if its package is not installed.
    """

    # The setting that turns it on. Its value is the project or the experiment.
    name: ClassVar[str]
    # The module to import, what installs it, and its name in an error.
    package: ClassVar[tuple[str, str, str]]
    # For a remote tracker: what to do if it cannot begin.
    remedy: ClassVar[str | None] = None

    def __init__(self, folder: RunFolder, target: str = "") -> None:
        module, installed_by, name = self.package
        self._package = import_extra(module, installed_by, f"{self.name} needs {name}")
        self._folder = folder
        self._target = target

    @abstractmethod
    def begin(self, last_step: int) -> None:
        """Begin or resume, after the last step that the run has done."""

    @abstractmethod
    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Receive the figures of an event. Their names begin with its kind: ``"train/loss"``."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Send or write what is left, and end; nothing if it has not begun."""

    def _settings(self) -> dict[str, Any]:
        return flat(self._folder.record().config.as_dict())


class TensorBoard(Tracker):
    name: ClassVar = "log.tensorboard"
    package: ClassVar = ("torch.utils.tensorboard", "chatgot", "TensorBoard")

    _writer: Any = None

    def begin(self, last_step: int) -> None:
        # TensorBoard then ignores later steps in its earlier files.
        self._writer = self._package.SummaryWriter(str(self._folder.path / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb(Tracker):
    """A run of a W&B project, which resumes with the run. Steps that a resumed run repeats are sent again."""

    name: ClassVar = "log.wandb"
    package: ClassVar = ("wandb", "chatgot[wandb]", "wandb")
    remedy: ClassVar = "wandb login; or set WANDB_MODE=offline, and wandb sync later"

    _run: Any = None

    def begin(self, last_step: int) -> None:
        self._run = self._package.init(
            project=self._target,
            # The identity finds the run again, also after its folder was moved.
            id=self._folder.record().identity,
            name=self._folder.path.name,
            dir=str(self._folder.path),
            config=self._settings(),
            resume="allow",
            # Not the run of other code in this process.
            reinit="create_new",
            # Standard output may be one JSON document.
            settings=self._package.Settings(console="off"),
        )
        # The step counter of W&B must not go back, and a save is reported at the step that was saved.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def close(self, *, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


class Mlflow(Tracker):
    """A run of an MLflow experiment, found again by a tag. ``MLFLOW_TRACKING_URI`` names the server."""

    name: ClassVar = "log.mlflow"
    package: ClassVar = ("mlflow", "chatgot[mlflow]", "mlflow")
    remedy: ClassVar = "set MLFLOW_TRACKING_URI to a server that runs, or leave it out"

    _client: Any = None
    _run_id = ""

    def __init__(self, folder: RunFolder, target: str, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(folder, target)
        self._now = now
        self._waiting: list[Any] = []
        self._sent = now()

    def begin(self, last_step: int) -> None:
        self._client = self._package.MlflowClient()
        experiment = self._client.get_experiment_by_name(self._target)
        found = None if experiment is None else self._find_run(experiment.experiment_id)
        self._run_id = found or self._create_run(experiment)

    def _find_run(self, experiment_id: str) -> str | None:
        wanted = f"tags.`tensorkeep.run` = '{self._folder.record().identity}'"
        runs = self._client.search_runs([experiment_id], filter_string=wanted, max_results=1)
        if not runs:
            return None
        run_id: str = runs[0].info.run_id
        # The run was set to FINISHED or FAILED when it ended.
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _create_run(self, experiment: Any) -> str:
        client, param = self._client, self._package.entities.Param
        experiment_id = client.create_experiment(self._target) if experiment is None else experiment.experiment_id
        values = self._settings()
        names = _accepted_names(values)
        # A tag maps the changed names to the settings, as JSON.
        changed = {sent: name for name, sent in names.items() if sent != name}
        tags = {"tensorkeep.run": self._folder.record().identity}
        tags |= {"tensorkeep.names": json.dumps(changed)} if changed else {}
        run_id: str = client.create_run(experiment_id, run_name=self._folder.path.name, tags=tags).info.run_id
        self._send(run_id, "params", [param(names[name], str(value)) for name, value in values.items()])
        return run_id

    def _send(self, run_id: str, kind: str, values: list[Any]) -> None:
        for begin in range(0, len(values), _LARGEST_BATCH):
            self._client.log_batch(run_id, **{kind: values[begin : begin + _LARGEST_BATCH]})

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        metric, milliseconds = self._package.entities.Metric, int(time.time() * 1000)
        self._waiting += [metric(name, float(value), milliseconds, step) for name, value in figures.items()]
        # A run that is killed repeats the steps after its last checkpoint, and no others.
        if kind == "save" or self._now() - self._sent >= _SECONDS_BETWEEN:
            self._send_waiting()

    def _send_waiting(self) -> None:
        self._send(self._run_id, "metrics", self._waiting)
        self._waiting.clear()
        self._sent = self._now()

    def close(self, *, failed: bool) -> None:
        if self._run_id:
            self._send_waiting()
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _accepted_names(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        sent = _NOT_IN_NAMES.sub("_", name)
        # Two settings may get the same name.
        while sent in found.values():
            sent += "_"
        found[name] = sent
    return found


def trackers_of(config: LogConfig, folder: RunFolder) -> list[Tracker]:
    """Return the trackers that the settings ask for; MissingExtraError if the package of one is not installed."""
    targets = {TensorBoard: config.tensorboard or None, Wandb: config.wandb, Mlflow: config.mlflow}
    return [kind(folder, str(target)) for kind, target in targets.items() if target is not None]


def figures_of(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers among the values of an event, with names such as ``"train/loss"``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from figures_of(f"{kind}/{name}", value)
        elif isinstance(value, int | float):
            yield f"{kind}/{name}", value


class TrainingLog:
    """Writes ``log.jsonl``, and passes its figures to trackers. Nothing is opened or written before `begin`."""

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._trackers = list(trackers)
        self._open = ExitStack()

    def begin(self, last_step: int) -> None:
        """Open the file, without its lines after the last step; StoreError if the operating system refuses."""
        with store_errors(self._path, "read the log"):
            content = self._path.read_bytes() if self._path.exists() else b""
        # The steps after the checkpoint run again; without this, a plot would show them twice.
        kept = [f"{json.dumps(line)}\n" for line in lines_of(content) if line["step"] <= last_step]
        # Replaced atomically, so that no crash loses the lines that are kept.
        replace_file(self._path, "".join(kept).encode())
        with store_errors(self._path, "write the log"):
            # Line-buffered: other processes, and whoever reads it after a crash, find every line.
            self._file = self._open.enter_context(self._path.open("a", buffering=1))
            for tracker in self._trackers:
                try:
                    tracker.begin(last_step)
                # The packages raise errors of many kinds. The run can resume: its record was written before.
                except Exception as error:
                    if tracker.remedy is None:
                        raise
                    raise StoreError(
                        f"{tracker.name}: the run cannot be logged there: {first_line(error)}",
                        remedy=f"{tracker.remedy}; then repeat the command with --resume",
                    ) from error

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Write an event of a step; StoreError if the operating system refuses."""
        line = {"step": step, "kind": kind} | {name: _finite(value) for name, value in values.items()}
        with store_errors(self._path, "write the log"):
            self._file.write(json.dumps(line) + "\n")
            if self._trackers and (figures := dict(figures_of(kind, values))):
                self._for_each_tracker(lambda tracker: tracker.write(step, kind, figures))

    def _for_each_tracker(self, call: Callable[[Tracker], object]) -> None:
        # A copy of the list: a tracker that fails is removed from it.
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                # A tracker on this disk fails for the reasons that the log would fail for.
                if tracker.remedy is None:
                    raise
                self._trackers.remove(tracker)
                logger.warning("%s is off from now on: %s; log.jsonl has all figures", tracker.name, first_line(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with store_errors(self._path, "write the log"), self._open:
                self._for_each_tracker(lambda tracker: tracker.close(failed=error is not None))
        except StoreError as failure:
            # The error that ended the block is more important.
            if error is None:
                raise
            error.add_note(str(failure))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    # JSON has no number that is not finite.
    return None if isinstance(value, float) and not math.isfinite(value) else value
