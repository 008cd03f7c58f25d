"""``tensorkeep export``: write the model of a run as a folder for Hugging Face transformers."""

from pathlib import Path
from typing import Annotated

from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.export import export as write_export
from chatgot.run.weights import load_trained_at
from tensorkeep.ext import format_bytes
from tensorkeep.ext.cli import DEFAULT, Output, Run, Switch, Which, print_lines


def export(
    run: Run,
    /,
    *,
    out: Path,
    which: Which = "last",
    dtype: str | None = None,
    overwrite: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Export the model of a run for Hugging Face transformers.

    Parameters
    ----------
    out
        The folder to create.
    dtype
        The dtype of the weights; by default the dtype of training.
    overwrite
        Replace an existing export.
    """
    # On the CPU: the weights are only written.
    trained = load_trained_at(run, which=which, device="cpu")
    tokenizer = trained.tokenizer
    tokenizer_json = tokenizer.hugging_face_json()
    if tokenizer_json is None:
        output.note(f"no tokenizer is exported: a tokenizer.json cannot hold {tokenizer.name}")
    report = write_export(
        trained.model,
        trained.model.config,
        out,
        tokenizer_json=tokenizer_json,
        begin_of_document=tokenizer.begin_of_document,
        end_of_document=tokenizer.end_of_document,
        end_of_message=tokenizer.end if isinstance(tokenizer, ChatTokenizer) else None,
        dtype=dtype,
        overwrite=overwrite,
    )
    document = {"step": trained.step.number, **report.as_dict()}
    text = f"wrote {report.path}: {report.architecture} of step {trained.step.number}, {report.parameters:,} parameters"
    output.show(document, lambda: print_lines(f"{text} in {report.dtype}, {format_bytes(report.stored_bytes)}"))
