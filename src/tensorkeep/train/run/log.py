"""The log of a run, one JSON object per line, and the experiment trackers that receive its figures.

A resume does not repeat steps in the log. The package of a tracker is imported only if its setting asks for it.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from tensorkeep.errors import StoreError, first_line, import_extra
from tensorkeep.storage.commit import replace_file
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.train.config.config import LogConfig, flat
from tensorkeep.train.run.folder import RunFolder

logger = logging.getLogger(__name__)

# Seconds between two requests to an MLflow server, which each take a while.
_SECONDS_BETWEEN = 5.0
# MLflow's limit on the parameters of a request; that on metrics is larger.
_LARGEST_BATCH = 100
# Characters that MLflow refuses in names. Patterns of parameter groups contain them.
_NOT_IN_NAMES = re.compile(r"[^\w/ .:-]")


class Tracker(Protocol):
    """Receives the figures of a run, on rank 0.

    ``is_remote`` trackers may fail while the run continues.
    """

    name: ClassVar[str]
    is_remote: ClassVar[bool]

    def begin(self, last_step: int) -> None:
        """Begin or resume, after the last step that the run has done."""

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Receive the figures of an event. Their names begin with its kind: ``"train/loss"``."""

    def close(self, *, failed: bool) -> None:
        """End, with what was written."""


def trackers_of(config: LogConfig, folder: RunFolder) -> list[Tracker]:
    """Return the trackers that the settings ask for; MissingExtraError if the package of one is not installed."""
    found: list[Tracker] = []
    if config.tensorboard:
        found.append(TensorBoard(folder))
    if config.wandb is not None:
        found.append(Wandb(folder, config.wandb))
    if config.mlflow is not None:
        found.append(Mlflow(folder, config.mlflow))
    return found


def figures_of(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers among the values of an event, with names such as ``"train/loss"``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from figures_of(f"{kind}/{name}", value)
        elif isinstance(value, int | float):
            yield f"{kind}/{name}", value


class TensorBoard:
    """TensorBoard's files, in the folder of the run."""

    name: ClassVar[str] = "log.tensorboard"
    is_remote: ClassVar[bool] = False

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._writer_class: Callable[..., Any] = import_extra(
            "torch.utils.tensorboard", "train", f"{self.name} needs TensorBoard"
        ).SummaryWriter
        self._writer: Any = None

    def begin(self, last_step: int) -> None:
        """Open a file."""
        # TensorBoard then ignores later steps in its earlier files.
        self._writer = self._writer_class(str(self._folder.path / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Write the figures."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """Weights & Biases: a run of a project. It resumes when the run does.

    The steps that a resumed run repeats are sent again, with the same values.
    """

    name: ClassVar[str] = "log.wandb"
    is_remote: ClassVar[bool] = True

    def __init__(self, folder: RunFolder, project: str) -> None:
        self._folder = folder
        self._project = project
        self._wandb = import_extra("wandb", "wandb", f"{self.name} needs wandb")
        self._run: Any = None

    def begin(self, last_step: int) -> None:
        """Make the run, or find it."""
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=self._folder.record().identity,
                name=self._folder.path.name,
                dir=str(self._folder.path),
                config=flat(self._folder.record().config.as_dict()),
                resume="allow",
                # Not the run of other code in this process.
                reinit="create_new",
                # Standard output may be one JSON document.
                settings=self._wandb.Settings(console="off"),
            )
            # Its own counter of steps must not go back, and a save is reported at the step that was saved.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise _refused(self.name, error, "wandb login; or set WANDB_MODE=offline, and wandb sync later") from error

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Send the figures, in the background."""
        self._run.log({**figures, "step": step})

    def close(self, *, failed: bool) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


class Mlflow:
    """MLflow: a run of an experiment, found again by a tag. It resumes when the run does.

    ``MLFLOW_TRACKING_URI`` names the server. In names of settings, characters that it refuses become ``_``;
    the tag ``tensorkeep.names`` maps such names to the settings, as JSON.
    """

    name: ClassVar[str] = "log.mlflow"
    is_remote: ClassVar[bool] = True

    def __init__(self, folder: RunFolder, experiment: str, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._experiment = experiment
        self._mlflow = import_extra("mlflow", "mlflow", f"{self.name} needs mlflow")
        self._now = now
        self._client: Any = None
        self._run_id = ""
        self._waiting: list[Any] = []
        self._sent = now()

    def begin(self, last_step: int) -> None:
        """Make the run, or find it."""
        try:
            self._client = self._mlflow.MlflowClient()
            self._run_id = self._found() or self._made()
        except Exception as error:
            raise _refused(
                self.name, error, "set MLFLOW_TRACKING_URI to a server that runs, or leave it out"
            ) from error

    def _found(self) -> str | None:
        """Return the id of the run that this one resumes; None if it is new."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        wanted = f"tags.`tensorkeep.run` = '{self._folder.record().identity}'"
        runs = self._client.search_runs([experiment.experiment_id], filter_string=wanted, max_results=1)
        if not runs:
            return None
        run_id: str = runs[0].info.run_id
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _made(self) -> str:
        client, param = self._client, self._mlflow.entities.Param
        experiment = client.get_experiment_by_name(self._experiment)
        place = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
        values = flat(self._folder.record().config.as_dict())
        names = _accepted_names(values)
        changed = {sent: name for name, sent in names.items() if sent != name}
        tags = {"tensorkeep.run": self._folder.record().identity}
        tags |= {"tensorkeep.names": json.dumps(changed)} if changed else {}
        run_id: str = client.create_run(place, run_name=self._folder.path.name, tags=tags).info.run_id
        settings = [param(names[name], str(value)) for name, value in values.items()]
        for begin in range(0, len(settings), _LARGEST_BATCH):
            client.log_batch(run_id, params=settings[begin : begin + _LARGEST_BATCH])
        return run_id

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Send the figures, several events at once."""
        metric, milliseconds = self._mlflow.entities.Metric, int(time.time() * 1000)
        self._waiting += [metric(name, float(value), milliseconds, step) for name, value in figures.items()]
        # A run that is killed repeats the steps after its last checkpoint, and no others.
        if kind == "save" or self._now() - self._sent >= _SECONDS_BETWEEN:
            self._send()

    def _send(self) -> None:
        for begin in range(0, len(self._waiting), _LARGEST_BATCH):
            self._client.log_batch(self._run_id, metrics=self._waiting[begin : begin + _LARGEST_BATCH])
        self._waiting.clear()
        self._sent = self._now()

    def close(self, *, failed: bool) -> None:
        """Send what is left, and the end."""
        if self._run_id:
            self._send()
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _accepted_names(names: Iterable[str]) -> dict[str, str]:
    """Return different names that MLflow accepts, by the names that they are sent for."""
    found: dict[str, str] = {}
    for name in names:
        sent = _NOT_IN_NAMES.sub("_", name)
        while sent in found.values():
            sent += "_"
        found[name] = sent
    return found


def _refused(setting: str, error: Exception, remedy: str) -> StoreError:
    # Its record was written before.
    remedy = f"{remedy}; then repeat the command with --resume"
    return StoreError(f"{setting}: the run cannot be logged there: {first_line(error)}", remedy=remedy)


class TrainingLog:
    """Writes ``log.jsonl``, and passes its figures to trackers; a context manager.

    Nothing is opened or written before `begin`. A remote tracker that fails is left out from then on, with a warning.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._trackers = list(trackers)
        self._begun: list[Tracker] = []
        self._open = ExitStack()

    def begin(self, last_step: int) -> None:
        """Open the file, without its lines after the last step that the run has done, which a resumed run repeats.

        Raises StoreError if the operating system refuses.
        """
        kept = [line for line in _lines(self._path) if line["step"] <= last_step]
        # Replaced atomically, so that no crash loses the lines that are kept.
        replace_file(self._path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        with store_errors(self._path, "write the log"):
            # Line-buffered: other processes, and whoever reads it after a crash, find every line.
            self._file = self._open.enter_context(self._path.open("a", buffering=1))
            for tracker in self._trackers:
                tracker.begin(last_step)
                self._begun.append(tracker)

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Write an event of a step. Numbers that are not finite become null, because JSON cannot represent them.

        Raises StoreError if the operating system refuses.
        """
        line = {"step": step, "kind": kind} | {name: _finite(value) for name, value in values.items()}
        with store_errors(self._path, "write the log"):
            self._file.write(json.dumps(line) + "\n")
            figures = dict(figures_of(kind, values)) if self._begun else {}
            for tracker in list(self._begun) if figures else ():
                with self._left_out_if_it_fails(tracker):
                    tracker.write(step, kind, figures)

    @contextmanager
    def _left_out_if_it_fails(self, tracker: Tracker) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not tracker.is_remote:
                raise
            self._begun.remove(tracker)
            logger.warning("%s is off from now on: %s; log.jsonl has all figures", tracker.name, first_line(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with store_errors(self._path, "write the log"), self._open:
                for tracker in list(self._begun):
                    with self._left_out_if_it_fails(tracker):
                        tracker.close(failed=error is not None)
        except StoreError as failure:
            # The error that ended the block is more important.
            if error is None:
                raise
            error.add_note(str(failure))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with store_errors(path, "read the log"):
        content = path.read_bytes() if path.exists() else b""
    return lines_of(content)


def lines_of(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, without damaged ones: the last line may be incomplete."""
    for text in content.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
