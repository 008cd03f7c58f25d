"""``tensorkeep generate``: continue a text with the model of a run."""

import sys
import time
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.cli.options import Run, Which
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import print_lines
from tensorkeep.train.generate import generate as continue_prompt
from tensorkeep.train.generate import prompt_ids
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.trained import load_trained
from tensorkeep.units import counted


def generate(
    run: Run,
    /,
    *,
    prompt: str | None = None,
    tokens: Annotated[int, Parameter(validator=Number(gte=1, lte=1_000_000))] = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    which: Which = "last",
    device: str = "auto",
    cache: bool = True,
    output: Output = DEFAULT,
) -> None:
    """Continue a text with the model of a run.

    Parameters
    ----------
    prompt
        The text to continue; by default a new document or line.
    tokens
        The largest number of tokens to generate.
    temperature
        0 always takes the most probable token; values above 1 flatten the distribution.
    top_k
        Sample from this many of the most probable tokens only.
    top_p
        Sample from the most probable tokens with this total probability only.
    seed
        The seed of the sampling.
    device
        The device of the model.
    cache
        Cache keys and values between tokens.
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
    output.show(document, lambda: print_lines(*text.splitlines()))
    if not output.json:
        output.note(f"{counted(count, 'token')} after step {trained.step.number}: {count / seconds:,.0f} tokens/s")
    sys.stdout.flush()
