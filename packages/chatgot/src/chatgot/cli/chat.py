"""``tensorkeep chat``: a conversation with the model of a run."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress

from chatgot.cli.generate import DEFAULT_OPTIONS, GenerateOptions, show_stream
from chatgot.generate import ChatSession
from chatgot.run.weights import load_trained_at
from chatgot.step.cpu import SpinControl
from tensorkeep.errors import UsageError
from tensorkeep.ext import counted
from tensorkeep.ext.cli import DEFAULT, Output, Run

_PROMPT = "> "
_HELP = "commands: /reset forgets the conversation, /exit or Ctrl-D leaves; Ctrl-C ends an answer"


def chat(
    run: Run,
    /,
    *,
    system: str | None = None,
    options: GenerateOptions = DEFAULT_OPTIONS,
    output: Output = DEFAULT,
) -> None:
    """Talk with a model that was trained on conversations.

    Each line is a message, and answers are printed as they are generated. /reset forgets the conversation; Ctrl-C ends
    an answer; Ctrl-D or /exit leaves. Without a terminal, each line of standard input is a message, whatever it is.

    Parameters
    ----------
    system
        The system message at the start of the conversation.
    """
    # Before the model is loaded, which takes long: an option out of range.
    sampling = options.sampling()
    trained = load_trained_at(run, which=options.which, device=options.device)
    session = ChatSession(
        trained.model,
        trained.tokenizer,
        sampling,
        system=system,
        max_new_tokens=options.tokens,
        stop=options.stop or (),
        seed=options.seed,
    )
    terminal, begin = sys.stdin.isatty(), time.perf_counter()
    if terminal:
        output.note(f"{trained.model.config.parameter_count():,} parameters, step {trained.step.number}; {_HELP}")
    # OpenMP threads that spin slow the answer down beside other processes.
    with SpinControl():
        for text in _messages():
            # Only typed lines can be commands: no line of a file is lost, even if it begins with a slash.
            match text.strip() if terminal else "":
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
    """Yield lines that are not blank, from the terminal or from standard input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and a history
    while True:
        try:
            text = _read_line()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if text.strip():
            yield text


def _read_line() -> str:
    if sys.stdout.isatty():
        # The line editor prints the prompt when it is ready. A Ctrl-D before that would be lost.
        return input(_PROMPT)
    # `input` would print the prompt on stdout, which holds the answers, or one JSON document.
    print(_PROMPT, end="", file=sys.stderr, flush=True)
    return input()


def _answer(session: ChatSession, text: str, output: Output, *, terminal: bool) -> None:
    """Print the answer to a message. On a terminal, an error is printed and the conversation continues."""
    left_out = session.left_out
    try:
        pieces = session.answer(text)
    except UsageError as error:
        if not terminal:
            raise
        output.note(f"error: {error}")
        return
    if session.left_out > left_out:
        left = "is left out, the oldest one" if session.left_out == 1 else "are left out, the oldest ones"
        output.note(f"the context is full: {counted(session.left_out, 'turn')} {left}")
    try:
        # An interrupted answer is recorded as far as it was printed.
        with closing(pieces):
            show_stream(pieces, output)
    except KeyboardInterrupt:
        if not terminal:
            raise
        output.note("interrupted")
