"""The command line: find the command, run it, and turn whatever happens into an exit code.

The codes are listed in `tensorkeep.cli.failures`. Commands are imported when they run, so that ``tensorkeep --help``
imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from cyclopts import App

from tensorkeep.cli.failures import BROKEN_PIPE, tell
from tensorkeep.cli.options import flags_after_command, from_environment, from_file
from tensorkeep.cli.output import Output
from tensorkeep.cli.streams import finish_stdout, make_streams_safe
from tensorkeep.errors import StoreError
from tensorkeep.version import __version__

_COMMANDS = {
    "info": ("contents:info", "Show what a checkpoint holds, without reading a tensor."),
    "ls": ("contents:ls", "List a checkpoint's tensors."),
    "verify": ("verify:verify", "Read checkpoints to the end and check every byte that can be checked."),
    "diff": ("diff:diff", "Compare two checkpoints of any formats; exit code 1 if they differ."),
    "convert": ("convert:convert", "Write a checkpoint again, in another format or with another compression."),
    "prune": ("prune:prune", "Delete the steps of a training run that no rule wants."),
    "env": ("env:env", "Show what of this machine matters to checkpoints."),
    "bench checkpoint": ("bench:checkpoint", "Compare ways to save and load a checkpoint."),
    "bench claims": ("bench:claims", "Check what is often said of these ways against this machine."),
    "bench training": ("bench_training:training", "Compare techniques of training, and other settings of a recipe."),
    "data prepare": ("data:prepare", "Turn text into tokens for a training run."),
    "data info": ("data:info", "Show what a folder of prepared data holds."),
    "train": ("train:train", "Train a model, or go on with a run that was stopped or killed."),
    "generate": ("generate:generate", "Continue a text with the model of a run."),
    "export": ("generate:export", "Write the model of a run as a folder that Hugging Face transformers opens."),
    "report": ("report:report", "Print the tables of a run of the bench, and write its report."),
    "tune checkpoint": ("tune:checkpoint", "Find the settings that save checkpoints fastest in a folder."),
    "tune training": ("tune_training:training", "Find the techniques and the batch size that fit into some memory."),
    "demo": ("demo:demo", "See on this machine what Tensorkeep does, beside torch and safetensors."),
}

_GROUPS = {
    "data": "Prepare text for training.",
    "bench": "Measure on this machine, one process per cell, and say what is best here.",
    "tune": "Measure this machine, and find the settings that suit it.",
}

_EPILOGUE = """\
Options also come from the environment (TENSORKEEP_MEMORY_BUDGET=1GiB) and from a TOML file (-C FILE) with one table \
per command; a flag wins over the environment, the environment over the file.

Exit codes: 0 ok, 1 difference or failed check, 2 usage, 3 I/O or store error, 4 corrupt, 5 not found or not a \
checkpoint, 6 destination exists, 7 unsupported, 70 internal error, 130 interrupted."""


def build_app() -> App:
    """Return the application: its commands by name, none of them imported yet."""
    app = App(
        name="tensorkeep",
        help="Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.",
        help_format="plaintext",
        help_epilogue=_EPILOGUE,
        version=__version__,
        config=(from_environment, partial(from_file, [name.partition(" ")[0] for name in _COMMANDS])),
    )
    groups: dict[str, App] = {}
    for place, (name, (home, summary)) in enumerate(_COMMANDS.items()):
        group, _, rest = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(name=group, help=_GROUPS[group], sort_key=place, help_epilogue="")
            app.command(groups[group])
        # The epilogue is for the whole program; an empty one keeps it out of each command's help.
        groups.get(group, app).command(
            f"tensorkeep.cli.{home}", name=rest, help=summary, sort_key=place, help_epilogue=""
        )
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        What stands after ``tensorkeep``; taken from the process unless given.
    """
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
    return tell(unwritten, as_json=False, verbose=False)


def _run(tokens: list[str]) -> int:
    # Until the options are parsed, this is how an error in them learns how it is to be told.
    as_json = "--json" in tokens or os.environ.get("TENSORKEEP_JSON", "").lower() in ("1", "true", "yes")
    output = Output(json=as_json, verbose=not {"-v", "--verbose"}.isdisjoint(tokens))
    try:
        command, bound, _ = build_app().parse_args(
            flags_after_command(tokens, _GROUPS), exit_on_error=False, print_error=False
        )
        output = bound.arguments.get("output", output)
        return command(*bound.args, **bound.kwargs) or 0
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return tell(error, as_json=output.json, verbose=output.verbose)
