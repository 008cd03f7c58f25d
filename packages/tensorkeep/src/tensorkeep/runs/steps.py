"""A step of a training run, its checkpoint ``step-000100``, and its metrics, which rank the steps."""

import json
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, SupportsIndex

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UsageError, did_you_mean
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.formats.native.directory import CheckpointSummary, foreign_names, is_native, summarise
from tensorkeep.paths import STEP_NAME
from tensorkeep.storage import open_directory
from tensorkeep.storage.base import MANIFEST_NAME

# Step numbers have at most 18 digits: they fit into an int64, and their names sort.
_LARGEST = 10**18 - 1


@dataclass(frozen=True, slots=True)
class Step:
    """A complete step of a run: its manifest is valid, and its files have the right sizes. No tensor was read.

    Attributes
    ----------
    number : int
    path : str
    saved_at : float
        Seconds since 1970 (UTC), by the clock of the machine that saved the step.
    metrics : mapping of str to float
    nbytes, own_bytes : int
        Bytes of all files of the step, and of the files that no other step shares. Deleting the step frees
        ``own_bytes``.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> with tensorkeep.CheckpointManager(folder.name) as manager:
    ...     report = manager.save(10, {"w": torch.ones(9)}, metrics={"loss": 2.0}).wait()
    ...     step = manager.latest()
    >>> step.number, step.metrics["loss"], step.path == report.path
    (10, 2.0, True)
    >>> folder.cleanup()
    """

    number: int
    path: str
    saved_at: float
    metrics: Mapping[str, float]
    nbytes: int
    own_bytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        # The view of the metrics that keeps them unchanged has no pickle.
        return _step, (self.number, self.path, self.saved_at, dict(self.metrics), self.nbytes, self.own_bytes)


def _step(number: int, path: str, saved_at: float, metrics: dict[str, float], nbytes: int, own_bytes: int) -> Step:
    return Step(number, path, saved_at, MappingProxyType(metrics), nbytes, own_bytes)


@dataclass(frozen=True, slots=True)
class StepListing:
    """The complete steps of a run, by number, and for each broken step what is wrong with it."""

    steps: list[Step]
    broken: Mapping[int, TensorkeepError]


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """A step that is on the local disk and not in the store yet; `CheckpointManager.uploads` returns them.

    Attributes
    ----------
    step : int
    state : {"waiting", "uploading", "failed"}
        The manager tries a failed step again when the next step is saved, and in `CheckpointManager.wait`. It does not
        try again if the step is damaged, or if the store has another step of that number.
    bytes_done, bytes_total : int
        Bytes that were sent, and bytes to send in total. Files that the store has from earlier steps are not counted.
        Both are 0 before the upload begins.
    error : str or None
        Why the upload failed.

    Examples
    --------
    >>> from tensorkeep import UploadStatus
    >>> status = UploadStatus(100, "uploading", bytes_done=50_000_000, bytes_total=200_000_000)
    >>> f"step {status.step}: {status.bytes_done / status.bytes_total:.0%}"
    'step 100: 25%'
    """

    step: int
    state: Literal["waiting", "uploading", "failed"]
    bytes_done: int = 0
    bytes_total: int = 0
    error: str | None = None


def step_number(number: SupportsIndex, root: Path | None = None) -> int:
    """Return a number, also of numpy or torch, as an int; UsageError if it is negative or has over 18 digits."""
    try:
        # A bool is an int in Python, but `save(True, ...)` is a mistake.
        found = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = -1
    if not 0 <= found <= _LARGEST:
        raise UsageError(f"{number!r} is not the number of a step", path=root, remedy="give an int of 0 or more")
    return found


def step_path(root: Path, number: SupportsIndex) -> Path:
    return root / f"step-{step_number(number, root):06d}"


def step_numbers(names: Iterable[str]) -> list[int]:
    found = (match for name in names if (match := STEP_NAME.fullmatch(name)))
    # `step-0000100` and `step-000100` would be one number: only the name that `step_path` gives counts.
    return sorted(int(match[1]) for match in found if f"step-{int(match[1]):06d}" == match[0])


def step_of(path: Path, number: int, summary: CheckpointSummary) -> Step:
    record = summary.outline.step
    # Checkpoints that a manager did not save have no record. The first file is the manifest, which is written last.
    saved_at = record.saved_at if record else summary.files[0].st_mtime
    metrics = MappingProxyType({name: float(value) for name, value in record.metrics.items()} if record else {})
    return Step(number, os.fspath(path), saved_at, metrics, summary.nbytes, summary.own_bytes)


def check_is_step(path: Path, foreign: Sequence[str] | None = None) -> None:
    """Raises NotACheckpointError unless it is a native checkpoint, UsageError if it contains foreign files."""
    if foreign is None:
        if not is_native(path):
            text = "is not a checkpoint of Tensorkeep, or has lost its manifest, so it is not deleted"
            raise NotACheckpointError(text, path=path, remedy="if it is not needed, remove it yourself")
        foreign = foreign_names(path)
    # To delete the step would delete the user's file with it.
    if foreign:
        text = f"holds {foreign[0]!r}, which does not belong to the step, so it is not deleted"
        raise UsageError(text, path=path, remedy="move that file elsewhere first")


def is_damaged(path: Path) -> bool:
    """Return whether a path is a step with a damaged manifest, or with missing or truncated files."""
    try:
        summarise(path)
    except CorruptCheckpointError:
        return True
    except TensorkeepError:
        pass  # nothing is there, or it was written by another tool or a later version
    return False


def manifest_digest(path: Path) -> str | None:
    """Return the checksum of a step's manifest, damaged or not; None if the manifest cannot be read."""
    # The raw bytes, because a damaged manifest cannot be parsed: only whether it has changed counts.
    try:
        with open_directory(path) as directory, directory.open(MANIFEST_NAME) as file:
            return digest(file.read(0, file.size), wide=True)
    except TensorkeepError:
        return None


# Metrics: the metric that ranks the steps, its direction, and the best step.

_BY_MODE = {
    "min": re.compile("loss|losses|nll|ppl|perplexity|error|err|wer|cer|eer|mse|rmse|mae|mape|bpb|bpc|bpd|fid|kid"),
    "max": re.compile(
        "acc|accuracy|f1|precision|recall|auc|auroc|map|miou|iou|dice|bleu|rouge|chrf|meteor|psnr|ssim|r2|mcc|mrr|ndcg|"
        "reward"
    ),
}
# These words reverse the meaning of another word of the name, or make it a quantity that does not rank steps.
_REVERSED = re.compile("neg|negative|minus|inverse|reduction|improvement|drop|delta|change|scale|weight")


def direction(name: str) -> str | None:
    """Return "min" or "max" for a metric, by the words of its name; None if they do not say which is best."""
    words = _words(name)
    # A name with a word for each mode, such as "loss_accuracy", does not say.
    found = [mode for mode, known in _BY_MODE.items() if any(map(known.fullmatch, words))]
    return found[0] if len(found) == 1 and not any(map(_REVERSED.fullmatch, words)) else None


def checked_mode(mode: str | None) -> str | None:
    if mode not in ("min", "max", None):
        raise UsageError(f"mode is {mode!r}", remedy='give "min" or "max"')
    return mode


def mode_of(metric: str, mode: str | None) -> str:
    """Return the mode of a metric, by default known from its name; UsageError if it is not."""
    found = mode or direction(metric)
    if found is None:
        text = f"the name of the metric {metric!r} does not say whether its smallest or largest value is best"
        raise UsageError(text, remedy='give mode="min" or mode="max"')
    return found


def only_metric(names: Collection[str]) -> str | None:
    """Return the only metric, or None without any; UsageError if there are several."""
    if len(names) > 1:
        # The remedy names the likeliest metric first: a loss, then any with a known direction.
        first = min(names, key=lambda name: (direction(name) is None, "loss" not in _words(name), name))
        text = f"the steps have several metrics: {', '.join(sorted(names))}"
        raise UsageError(text, remedy=f"name the one that counts: metric={json.dumps(first, ensure_ascii=False)}")
    return next(iter(names), None)


def usual_metric(names: Collection[str]) -> str | None:
    """Return the only metric, the validation loss, or the loss; UsageError if several metrics are possible."""
    losses = [name for name in names if "loss" in _words(name) and direction(name)]
    validation = [name for name in losses if any(re.match("val|eval|test|dev", word) for word in _words(name))]
    for candidates in (validation, losses):
        if len(candidates) == 1:
            return candidates[0]
    return only_metric(names)


def metric_names(steps: Sequence[Step]) -> set[str]:
    return {name for step in steps for name in step.metrics}


def ranked(steps: Sequence[Step], metric: str, mode: str | None) -> list[Step]:
    """Return the steps with a value of a metric, best first, without NaN; of equally good steps the later first."""
    known = metric_names(steps)
    if known and metric not in known:
        names = ", ".join(sorted(known))
        text = f"no step has the metric {metric!r}, only {names}"
        raise UsageError(text, remedy=did_you_mean(metric, sorted(known), "name a metric of the steps"))
    sign = 1 if mode_of(metric, mode) == "min" else -1
    rated = [step for step in steps if not math.isnan(step.metrics.get(metric, math.nan))]
    return sorted(rated, key=lambda step: (sign * step.metrics[metric], -step.number))


def best_step(steps: Sequence[Step], metric: str | None = None, mode: str | None = None) -> Step | None:
    """Return the best step, by default by the `usual_metric`; None if no step has metrics, or all values are NaN."""
    checked_mode(mode)
    metric = metric or usual_metric(metric_names(steps))
    return None if metric is None else next(iter(ranked(steps, metric, mode)), None)


def _words(name: str) -> set[str]:
    parts = re.split(r"[^A-Za-z0-9]+", name)
    # `valLoss` has the words "val" and "loss".
    camel = [word for part in parts for word in re.split(r"(?<=[a-z0-9])(?=[A-Z])", part)]
    words = {word.lower() for word in (*parts, *camel)}
    # `eval/acc5` has the words "eval", "acc5" and "acc".
    return words | {word.rstrip("0123456789") for word in words}


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Return metrics as a `StepRecord` stores them; UsageError if one is not a number, or its name is not text."""
    found: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        try:
            # Scalars of torch and numpy are accepted as well.
            number = float(value)
            str(name).encode()
        except (TypeError, ValueError, OverflowError) as error:
            text = f"the metric {name!r:.80} is {value!r:.80}"
            raise UsageError(text, remedy="give a number, under a name that is text") from error
        # JSON has no NaN and no infinities.
        found[str(name)] = number if math.isfinite(number) else str(number)
    return found
