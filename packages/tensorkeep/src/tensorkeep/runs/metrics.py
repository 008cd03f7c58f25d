"""Metrics of steps: the metric that ranks the steps, its direction, and the best step."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tensorkeep.errors import UsageError, did_you_mean
from tensorkeep.runs.steps import Step

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
    """Return "min" or "max" for a metric, by the words of its name; None if they do not say which is best.

    >>> direction("eval/loss"), direction("top1_accuracy"), direction("score"), direction("neg_mse")
    ('min', 'max', None, None)
    """
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
        raise UsageError(
            f"the name of the metric {metric!r} does not say whether its smallest or largest value is best",
            remedy='give mode="min" or mode="max"',
        )
    return found


def only_metric(names: Collection[str]) -> str | None:
    """Return the only metric, or None without any; UsageError if there are several."""
    if len(names) > 1:
        # The remedy names the likeliest metric first: a loss, then any with a known direction.
        first = min(names, key=lambda name: (direction(name) is None, "loss" not in _words(name), name))
        raise UsageError(
            f"the steps have several metrics: {', '.join(sorted(names))}",
            remedy=f"name the one that counts: metric={json.dumps(first, ensure_ascii=False)}",
        )
    return next(iter(names), None)


def usual_metric(names: Collection[str]) -> str | None:
    """Return the metric that ranks steps if the user names none: the only one, the validation loss, or the loss.

    Raises UsageError if several metrics are possible.
    """
    losses = [name for name in names if "loss" in _words(name) and direction(name)]
    validation = [name for name in losses if any(re.match("val|eval|test|dev", word) for word in _words(name))]
    for candidates in (validation, losses):
        if len(candidates) == 1:
            return candidates[0]
    return only_metric(names)


def metric_names(steps: Sequence[Step]) -> set[str]:
    return {name for step in steps for name in step.metrics}


def ranked(steps: Sequence[Step], metric: str, mode: str | None) -> list[Step]:
    """Return the steps with a value of a metric, best first, without NaN; of equally good steps the later first.

    Raises UsageError if no step has the metric although some have others, or the mode is neither given nor known.
    """
    known = metric_names(steps)
    if known and metric not in known:
        names = ", ".join(sorted(known))
        raise UsageError(
            f"no step has the metric {metric!r}, only {names}",
            remedy=did_you_mean(metric, sorted(known), "name a metric of the steps"),
        )
    sign = 1 if mode_of(metric, mode) == "min" else -1
    rated = [step for step in steps if not math.isnan(step.metrics.get(metric, math.nan))]
    return sorted(rated, key=lambda step: (sign * step.metrics[metric], -step.number))


def best_step(steps: Sequence[Step], metric: str | None = None, mode: str | None = None) -> Step | None:
    """Return the best step, by default by the `usual_metric`; None if no step has metrics, or all values are NaN.

    Raises UsageError if no step has the metric although some have others, if several metrics are possible, or if the
    mode is neither given nor known from the name.
    """
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
            raise UsageError(
                f"the metric {name!r:.80} is {value!r:.80}", remedy="give a number, under a name that is text"
            ) from error
        # JSON has no NaN and no infinities.
        found[str(name)] = number if math.isfinite(number) else str(number)
    return found
