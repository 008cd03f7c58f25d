"""``tensorkeep generate``: continue a text with the model of a run."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec.structs import replace

from chatgot.data.tokenizers.base import prompt_ids
from chatgot.generate import Sampling, generate_stream, until_stop
from chatgot.run.weights import load_trained_at
from chatgot.step.cpu import SpinControl
from tensorkeep.ext import counted
from tensorkeep.ext.cli import DEFAULT, Output, Run, Which, printable_text


@Parameter(name="*")
@dataclass(frozen=True)
class GenerateOptions:
    """The options of commands that generate text.

    Attributes
    ----------
    tokens
        The most tokens to generate; in a conversation, the most tokens of an answer.
    temperature
        0 always takes the most probable token; values above 1 flatten the distribution.
    top_k
        Sample from this many of the most probable tokens only.
    top_p
        Sample from the most probable tokens with this total probability only.
    min_p
        Sample from the tokens that are at least this many times as probable as the most probable one.
    repetition_penalty
        Make tokens that are in the text already less probable; 1 changes nothing, 1.1 is usual.
    stop
        End before this text; may be repeated.
    seed
        The seed of the sampling.
    device
        The device of the model.
    """

    tokens: Annotated[int, Parameter(name=["--tokens", "--max-new-tokens"], validator=Number(gte=1, lte=1_000_000))] = (
        200
    )
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: Annotated[list[str] | None, Parameter(negative="", metavar="TEXT")] = None
    seed: int = 0
    which: Which = "last"
    device: str = "auto"

    def sampling(self) -> Sampling:
        """Return the settings of sampling; UsageError if an option is out of range."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return Sampling(**{name: getattr(self, name) for name in names})


DEFAULT_OPTIONS = GenerateOptions()


def generate(
    run: Run,
    /,
    *,
    prompt: str | None = None,
    cache: bool = True,
    options: GenerateOptions = DEFAULT_OPTIONS,
    output: Output = DEFAULT,
) -> None:
    """Continue a text with the model of a run, and print it as it is generated.

    Parameters
    ----------
    prompt
        The text to continue; by default a new document or line.
    cache
        Cache keys and values between tokens.
    """
    trained = load_trained_at(run, which=options.which, device=options.device)
    tokenizer, ids, count = trained.tokenizer, prompt_ids(trained.tokenizer, prompt), 0
    drawn = generate_stream(
        trained.model,
        ids,
        max_new_tokens=options.tokens,
        sampling=replace(options.sampling(), vocab_size=tokenizer.vocab_size),
        seed=options.seed,
        stop=tokenizer.end_of_document,
        use_cache=cache,
    )

    def prompt_and_new() -> Iterator[int]:
        nonlocal count
        # The prompt is decoded together with the new tokens: a character may have bytes of both.
        yield from ids[len(tokenizer.opening) :]
        for (token,) in drawn:
            count += 1
            yield token

    def text_until_stop() -> Iterator[str]:
        # Pieces end at characters, which may consist of several tokens.
        pieces = tokenizer.decode_stream(prompt_and_new())
        for piece in pieces:
            # The count rises while `pieces` advances: this piece contains the first new token.
            if count:
                yield from until_stop(chain([piece], pieces), options.stop or ())
                return
            # The prompt may contain a text that ends the new one.
            yield piece

    begin = time.perf_counter()
    with SpinControl():
        text = show_stream(text_until_stop(), output)
    seconds, step = time.perf_counter() - begin, trained.step.number
    output.show({"step": step, "text": text, "tokens": count, "seconds": seconds}, lambda: None)
    if not output.json:
        output.note(f"{counted(count, 'token')} after step {step}: {count / seconds:,.0f} tokens/s")


def show_stream(pieces: Iterator[str], output: Output) -> str:
    """Print pieces of text as they come, unless the output is JSON; return the text."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            if output.shows_text:
                print(printable_text(piece), end="", flush=True)
    finally:
        # Also after Ctrl-C, because the message and the shell's prompt must begin on a new line.
        if output.shows_text and text and not text.endswith("\n"):
            print(flush=True)
    return text
