"""``tensorkeep eval``: the loss of a run's model on a text, or its answers to multiple-choice questions."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from chatgot import scoring
from chatgot.cli.data import TEXT, TextOptions
from chatgot.data.batches import EvaluationWindows
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import is_prepared
from chatgot.data.sft_batches import windows_of
from chatgot.run.data import validation_windows
from chatgot.run.resume import current_config
from chatgot.run.weights import TrainedModel, load_trained_at
from chatgot.step.cpu import SpinControl
from tensorkeep.errors import NotFoundError, UsageError
from tensorkeep.ext import counted, format_bytes
from tensorkeep.ext.cli import DEFAULT, AtLeastOne, Output, Run, Table, Which

_ACCURACIES = ("acc", "acc_norm")
# Techniques that change what the model computes, and that only training applies.
_NOT_APPLIED = ("sparse-attention", "quantised-forward", "tf32")


@Parameter(name="*")
@dataclass(frozen=True)
class ComputeOptions:
    """The options that choose the model and how it computes.

    Attributes
    ----------
    precision
        The precision of matmuls: float32, bf16, fp16, or run for the precision of the run.
    batch_size
        Windows or endings that are computed at once; by default as many as fit.
    device
        The device of the model.
    """

    which: Which = "last"
    precision: scoring.Precision = "run"
    batch_size: Annotated[int | None, AtLeastOne] = None
    device: str = "auto"


DEFAULT_OPTIONS = ComputeOptions()


def evaluate(
    run: Run,
    /,
    *,
    data: str | None = None,
    text: TextOptions = TEXT,
    multiple_choice: Path | None = None,
    tokens: Annotated[int | None, AtLeastOne] = None,
    options: ComputeOptions = DEFAULT_OPTIONS,
    output: Output = DEFAULT,
) -> None:
    """Measure the model of a run on a text, or on multiple-choice questions.

    A text gives the loss per token, the perplexity, and bits per byte, which can be compared between tokenizers.
    Questions give two accuracies: acc chooses the ending with the largest total log-probability, acc_norm the ending
    with the largest mean per token.
    Without --data, the text is the validation split of the run's data, in the windows that the run itself evaluates.

    Parameters
    ----------
    data
        A text file, or another source that tensorkeep data prepare takes; or a folder of prepared data, for its
        validation split.
    multiple_choice
        A file of questions in HellaSwag's format instead of a text: on each line a JSON object with ctx, endings and
        label.
    tokens
        At most about this many tokens, in windows spread evenly over the text; by default all of a text, and of the
        run's own data as many as the run evaluates.
    """
    if multiple_choice is not None and (data is not None or tokens is not None):
        raise UsageError("--multiple-choice takes no text: --data and --tokens are for a text", remedy="leave one out")
    # Before the model is loaded, which takes long: a mistake in the file shows at once.
    questions = None if multiple_choice is None else scoring.read_questions(multiple_choice)
    trained = load_trained_at(run, which=options.which, device=options.device)
    # With the settings of the last segment, which trained these weights.
    config, place = current_config(trained.folder.record()), trained.model.tokens.weight.device
    for name in set(_NOT_APPLIED) & set(config.techniques):
        output.note(f"{name}, which the run was trained with, is off: the figures are of the model without it")
    chosen = scoring.resolve_precision(config, options.precision)
    # As many windows as memory allows, because few large matmuls are faster than many small ones.
    rows = options.batch_size or scoring.affordable_rows(config.model, place)
    document: dict[str, Any] = {"run": str(trained.folder.path), "step": trained.step.number}
    document |= {"device": str(place), "precision": chosen}
    begin = time.perf_counter()
    # Idle threads of OpenMP must not spin while other programs need the processors.
    with SpinControl(), scoring.compute_in(chosen, trained.model, config):
        if questions is not None:
            with output.meter("questions", of_bytes=False) as progress:
                choices = scoring.score_choices(
                    trained.model, questions, trained.tokenizer, rows=rows, progress=progress
                )
            document |= {"task": "multiple-choice", "file": str(multiple_choice), **choices._asdict()}
        else:
            source, windows = _windows(trained, data, text, tokens, output)
            if windows.note is not None:
                output.note(windows.note)
            with output.meter("evaluating", of_bytes=False) as progress:
                score = scoring.score_text(trained.model, windows, trained.tokenizer, rows=rows, progress=progress)
            document |= {"task": "text", "data": source, **score._asdict()}
    document["seconds"] = time.perf_counter() - begin
    output.show(document, lambda: Table(("", ""), _rows(document)).show())


def _windows(
    trained: TrainedModel, data: str | None, text: TextOptions, most: int | None, output: Output
) -> tuple[str, EvaluationWindows]:
    config = current_config(trained.folder.record())
    length = config.model.context_length
    if data is not None and is_prepared(data):
        dataset = Dataset.open(data, check=partial(_check_tokenizer, trained))
        return data, windows_of(dataset, length, most=most)
    if data is not None:
        with output.meter(f"reading {data}") as progress:
            tokens = scoring.read_tokens(data, trained.tokenizer, progress=progress, **vars(text))
        return data, EvaluationWindows(tokens, length, most=most)
    place = trained.folder.path / trained.folder.record().data.path
    if not is_prepared(place):
        raise NotFoundError(
            "the data of the run is no longer there", path=place, remedy="give its new location, or a text: --data PATH"
        )
    dataset = Dataset.open(place, check=trained.folder.check_data)
    # By default the windows of the run itself, so that the loss can be compared with its log.
    windows = validation_windows(config, dataset) if most is None else windows_of(dataset, length, most=most)
    return str(dataset.path), windows


def _check_tokenizer(trained: TrainedModel, dataset: Dataset) -> None:
    # The ids of another tokenizer are other tokens: the loss would be meaningless.
    if dataset.tokenizer.digest != trained.tokenizer.digest:
        raise UsageError(
            f"was prepared with another tokenizer ({dataset.tokenizer.name}) than the data of the run "
            f"({trained.tokenizer.name})",
            path=dataset.path,
            remedy="give the text itself, which is then tokenized as the run needs it",
        )


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    model = f"step {document['step']} of {document['run']}, {document['precision']} on {document['device']}"
    time = f"{document['seconds']:.1f} s"
    if document["task"] == "text":
        return [
            ("model", model),
            ("text", f"{document['data']}: {counted(document['tokens'], 'token')}, {format_bytes(document['bytes'])}"),
            ("loss", f"{document['loss']:.4f} nats per token"),
            ("perplexity", f"{document['perplexity']:,.2f}"),
            ("bits per byte", f"{document['bits_per_byte']:.4f}"),
            ("time", f"{time}, {document['tokens'] / document['seconds']:,.0f} tokens/s"),
        ]
    left_out = f", {document['truncated']} cut at the beginning" if document["truncated"] else ""
    return [
        ("model", model),
        ("questions", f"{document['file']}: {document['questions']:,}{left_out}"),
        *((name, f"{document[name]:.2%} (standard error {document[f'{name}_stderr']:.2%})") for name in _ACCURACIES),
        ("time", time),
    ]
