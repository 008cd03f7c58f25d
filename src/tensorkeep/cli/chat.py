"""``tensorkeep chat``: a conversation with the model of a run."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress

from tensorkeep.cli.generate import show_stream
from tensorkeep.cli.options import NewTokens, Run, StopTexts, Which
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.errors import UsageError
from tensorkeep.train.chat import ChatSession
from tensorkeep.train.generate import Sampling
from tensorkeep.train.run.trained import load_trained_at
from tensorkeep.train.spinning import SpinControl
from tensorkeep.units import counted

_PROMPT = "> "
_HELP = "commands: /reset forgets the conversation, /exit or Ctrl-D leaves; Ctrl-C ends an answer"


def chat(
    run: Run,
    /,
    *,
    system: str | None = None,
    tokens: NewTokens = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: StopTexts = None,
    seed: int = 0,
    which: Which = "last",
    device: str = "auto",
    output: Output = DEFAULT,
) -> None:
    """Talk with a model that was trained on conversations.

    Each line is a message, and answers are printed as they are generated. /reset forgets the conversation; Ctrl-C ends
    an answer; Ctrl-D or /exit leaves. Without a terminal, each line of standard input is a message.

    Parameters
    ----------
    system
        The system message, with which the conversation begins.
    tokens
        The largest number of tokens of an answer.
    temperature
        0 always takes the most probable token; values above 1 flatten the distribution.
    top_k
        Sample from this many of the most probable tokens only.
    top_p
        Sample from the most probable tokens with this total probability only.
    min_p
        Sample from the tokens that are at least this many times as probable as the most probable one.
    repetition_penalty
        Make tokens that the conversation has already less probable; 1 changes nothing, 1.1 is usual.
    stop
        End an answer before this text; may be repeated.
    seed
        The seed of the sampling.
    device
        The device of the model.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    trained = load_trained_at(run, which=which, device=device)
    session = ChatSession(
        trained.model, trained.tokenizer, sampling, system=system, max_new_tokens=tokens, stop=stop or (), seed=seed
    )
    terminal, begin = sys.stdin.isatty(), time.perf_counter()
    if terminal:
        output.note(f"{trained.model.config.parameter_count():,} parameters, step {trained.step.number}; {_HELP}")
    with SpinControl():
        for text in _messages():
            match text.strip():
                case "/exit":
                    break
                case "/reset":
                    session.reset()
                    output.note("the conversation is forgotten")
                case word if word.startswith("/"):
                    output.note(_HELP)
                case _:
                    _answer(session, text, output, terminal=terminal)
    document = {
        "step": trained.step.number,
        "messages": session.messages,
        "tokens": session.tokens,
        "seconds": time.perf_counter() - begin,
    }
    output.show(document, lambda: None)


def _messages() -> Iterator[str]:
    """Yield the lines that are not blank: from the terminal, where they can be edited, or from standard input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and a history
    while True:
        try:
            # The prompt of `input` goes to stdout, which has nothing but one document with --json.
            print(_PROMPT, end="", file=sys.stderr, flush=True)
            text = input()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if text.strip():
            yield text


def _answer(session: ChatSession, text: str, output: Output, *, terminal: bool) -> None:
    """Print the answer to a message. On a terminal, a message that cannot be answered ends nothing."""
    left_out = session.left_out
    try:
        pieces = session.answer(text)
    except UsageError as error:
        if not terminal:
            raise
        output.note(f"error: {error}")
        return
    if session.left_out > left_out:
        output.note(f"the context is full: {counted(session.left_out, 'turn')} are left out, the oldest ones")
    try:
        with closing(pieces):
            show_stream(pieces, output)
    except KeyboardInterrupt:
        if not terminal:
            raise
        output.note("interrupted")
