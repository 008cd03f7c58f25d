"""``tensorkeep generate`` and ``tensorkeep export``: what comes out of a run."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import counted, printable
from tensorkeep.train.export import export as write_export
from tensorkeep.train.generate import generate as continue_prompt
from tensorkeep.train.generate import prompt_ids
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.trained import load_trained
from tensorkeep.units import format_bytes


def generate(
    run: Path,
    /,
    *,
    prompt: str | None = None,
    tokens: Annotated[int, Parameter(validator=Number(gte=1, lte=1_000_000))] = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    which: Literal["last", "best"] = "last",
    device: str = "auto",
    cache: bool = True,
    output: Output = DEFAULT,
) -> int:
    """Continue a text with the model of a run.

    Parameters
    ----------
    run
        The folder that tensorkeep train wrote.
    prompt
        The text to continue; without it a new document or line is begun.
    tokens
        How many tokens follow it at most.
    temperature
        0 takes the likeliest token always; above 1 is wilder than the model.
    top_k
        Draw from the so many likeliest tokens only.
    top_p
        Draw from the likeliest tokens only, up to this probability together.
    seed
        Of the draws.
    which
        The last checkpoint, or the best one by its validation loss.
    device
        Where the model runs.
    cache
        Keep keys and values from token to token, instead of computing all of it anew.
    """
    trained = load_trained(RunFolder(run), which=which, device=device)
    ids = prompt_ids(trained.tokenizer, prompt)
    begin = time.perf_counter()
    end = trained.tokenizer.end_of_document
    found = continue_prompt(
        trained.model,
        ids,
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=end,
        vocab_size=trained.tokenizer.vocab_size,
        use_cache=cache,
    ).tolist()
    seconds = time.perf_counter() - begin
    text = trained.tokenizer.decode(found)
    count = len(found) - len(ids)
    document: dict[str, Any] = {"step": trained.step.number, "text": text, "tokens": count, "seconds": seconds}
    output.show(document, lambda: print("\n".join(map(printable, text.splitlines()))))
    if not output.json:
        output.note(f"{counted(count, 'token')} after step {trained.step.number}: {count / seconds:,.0f} tokens/s")
    sys.stdout.flush()
    return 0


def export(
    run: Path,
    /,
    *,
    out: Path,
    which: Literal["last", "best"] = "last",
    dtype: str | None = None,
    overwrite: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> int:
    """Write the model of a run as a folder that Hugging Face transformers opens.

    Parameters
    ----------
    run
        The folder that tensorkeep train wrote.
    out
        The folder to make.
    which
        The last checkpoint, or the best one by its validation loss.
    dtype
        Of the weights; as they were trained unless given.
    overwrite
        Replace an export that is there already.
    """
    trained = load_trained(RunFolder(run), which=which, device="cpu")
    tokenizer = trained.tokenizer
    report = write_export(
        trained.model,
        trained.model.config,
        out,
        tokenizer_json=tokenizer.hugging_face_json(),
        end_of_document=tokenizer.end_of_document,
        dtype=dtype,
        overwrite=overwrite,
    )
    document = {"step": trained.step.number, **asdict(report)}
    text = f"wrote {report.path}: {report.architecture} of step {trained.step.number}, {report.parameters:,} parameters"
    output.show(document, lambda: print(printable(f"{text} in {report.dtype}, {format_bytes(report.stored_bytes)}")))
    return 0
