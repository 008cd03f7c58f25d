"""The command line: parse, run the command, return an exit code.

A command returns its exit code, or None for 0. Commands are imported when they run, so that ``tensorkeep --help``
imports neither torch nor numpy.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial

from cyclopts import App

from tensorkeep.cli.errors import BROKEN_PIPE, report_error
from tensorkeep.cli.examples import epilogue
from tensorkeep.cli.help import Formatter, describe_fully
from tensorkeep.cli.options import (
    flags_after_command,
    from_environment,
    from_file,
    store_endpoint,
    with_local_paths,
)
from tensorkeep.cli.output import Output, finish_stdout, logging_to_stderr, make_streams_safe
from tensorkeep.errors import StoreError
from tensorkeep.version import __version__

COMMANDS = {
    "info": ("info:info", "Show what a checkpoint contains, or sum up a training run; no tensor is read."),
    "ls": ("info:ls", "List the tensors of a checkpoint."),
    "log": ("log:log", "List the steps of a training run, the newest first, and the legs in which it was trained."),
    "show": ("show:show", "Write a page about a checkpoint, a run or two checkpoints, and print a summary."),
    "verify": ("verify:verify", "Read checkpoints completely and check every checksum."),
    "diff": ("diff:diff", "Compare two checkpoints of any format; exit code 1 if they differ."),
    "convert": ("convert:convert", "Write a checkpoint in another format or with another compression."),
    "prune": ("prune:prune", "Delete old steps of a training run."),
    "env": ("env:env", "Show versions, the coder in use, hardware and file system, for a bug report."),
    "bench checkpoint": ("bench:checkpoint", "Compare ways to save and load a checkpoint."),
    "bench claims": ("bench:claims", "Check published claims about checkpoint formats on this machine."),
    "bench training": ("bench:training", "Compare training techniques and settings of a recipe."),
    "data prepare": ("data:prepare", "Tokenize text for a training run."),
    "data info": ("data:info", "Show the contents of a folder of prepared data."),
    "train": ("train:train", "Train a model, resume a run, or branch from one."),
    "generate": ("generate:generate", "Continue a text with the model of a run, and print it as it is generated."),
    "eval": (
        "evaluate:evaluate",
        "Measure the model of a run on a text, or on multiple-choice questions.",
    ),
    "chat": ("chat:chat", "Talk with a model that was trained on conversations."),
    "export": ("export:export", "Export the model of a run for Hugging Face transformers."),
    "report": ("report:report", "Print the tables of a results file and write its report."),
    "tune checkpoint": ("tune:checkpoint", "Find the settings that save fastest in a folder."),
    "tune training": ("tune_training:training", "Find the techniques and the batch size that fit into a memory limit."),
    "demo": ("demo:demo", "Show on this machine what Tensorkeep does, in about two minutes."),
    "completion": ("shell:completion", "Print the completion script of a shell."),
    "man": ("shell:man", "Print the manual page, in the language of man."),
}

GROUPS = {
    "data": "Prepare text for training.",
    "bench": "Measure on this machine, and recommend what to use.",
    "tune": "Find the best settings for this machine.",
}

EPILOGUE = """\
Options also come from the environment (TENSORKEEP_MEMORY_BUDGET=1GiB) and from a TOML file (-C FILE) with one table \
per command; a flag overrides the environment, the environment overrides the file.

Exit codes: 0 ok, 1 difference or failed check, 2 usage, 3 I/O or store error, 4 corrupt, 5 not found or not a \
checkpoint, 6 destination exists, 7 unsupported, 70 internal error, 130 interrupted."""


def build_app() -> App:
    """Return the application; its commands are imported when they run."""
    app = App(
        name="tensorkeep",
        help="Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.",
        help_format="plaintext",
        help_formatter=Formatter(),
        help_epilogue=f"{EPILOGUE}\n\n{epilogue('')}",
        version=__version__,
        version_flags=["--version", "-V"],
        config=(from_environment, partial(from_file, [name.partition(" ")[0] for name in COMMANDS]), with_local_paths),
    )
    groups: dict[str, App] = {}
    for position, (name, (module, summary)) in enumerate(COMMANDS.items()):
        group, _, rest = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(name=group, help=GROUPS[group], sort_key=position, help_epilogue=epilogue(group))
            app.command(groups[group])
        groups.get(group, app).command(
            f"tensorkeep.cli.{module}", name=rest, help=summary, sort_key=position, help_epilogue=epilogue(name)
        )
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process, and return its exit code."""
    make_streams_safe()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        finish_stdout()
        return BROKEN_PIPE
    failure = finish_stdout()
    if failure is None:
        return code
    if isinstance(failure, BrokenPipeError):
        return BROKEN_PIPE
    unwritten = StoreError(f"cannot write the output: {failure.strerror}", remedy="free some space, or write elsewhere")
    return report_error(unwritten, as_json=False, verbose=False)


def _run(tokens: list[str]) -> int:
    # Errors in the options themselves follow --json and -v, too.
    as_json = "--json" in tokens or os.environ.get("TENSORKEEP_JSON", "").lower() in ("1", "true", "yes")
    output = Output(json=as_json, verbose=not {"-v", "--verbose"}.isdisjoint(tokens))
    try:
        tokens = flags_after_command(tokens, GROUPS)
        app = build_app()
        words = [token for token in tokens if token not in app.help_flags]
        if len(words) < len(tokens):
            describe_fully(app.parse_commands(words)[1][-1])
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        output = bound.arguments.get("output", output)
        with logging_to_stderr(output), store_endpoint(bound.arguments.get("endpoint")):
            return command(*bound.args, **bound.kwargs) or 0
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, as_json=output.json, verbose=output.verbose)
