"""The table of commands and their examples. ``tensorkeep --help`` lists the commands without importing one."""

import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

from tensorkeep.cli.text import columns, has_colours
from tensorkeep.errors import MissingExtraError, installation_of

if TYPE_CHECKING:
    from cyclopts import App

# The packages that the commands of this table belong to.
CORE, TRAINER, BENCH = "tensorkeep", "chatgot", "tensorkeep-bench"


class Command(NamedTuple):
    """A command. ``target`` is the function, as ``module:function``; ``summary`` is the first line of its docstring."""

    target: str
    summary: str
    # The package to install if the module of the function cannot be found.
    package: str = CORE
    # Words of other programs that lead to it, which the error about an unknown command explains.
    also: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether the top-level package of ``target`` can be found; nothing is imported."""
        # A module of this package is found in sys.modules, and others by one look at sys.path.
        spec = find_spec(self.target.partition(".")[0])
        # A folder without modules, such as packages/chatgot in a clone, has no origin.
        return spec is not None and spec.origin is not None

    @property
    def marked_summary(self) -> str:
        return self.summary if self.installed else f"{self.summary} (needs {self.package})"


COMMANDS = {
    "info": Command(
        "tensorkeep.cli.info:info", "Show what a checkpoint contains, or sum up a training run; no tensor is read."
    ),
    "ls": Command("tensorkeep.cli.ls:ls", "List the tensors and plain values of a checkpoint."),
    "log": Command("tensorkeep.cli.log:log", "List the steps and segments of a training run, the newest step first."),
    "show": Command(
        "tensorkeep.cli.show:show", "Write a page about a checkpoint, a run, or two of either, and print a summary."
    ),
    "verify": Command("tensorkeep.cli.verify:verify", "Read checkpoints completely and check every checksum."),
    "diff": Command("tensorkeep.cli.diff:diff", "Compare two checkpoints of any format; exit code 1 if they differ."),
    "convert": Command(
        "tensorkeep.cli.convert:convert", "Write a checkpoint in another format or with another compression."
    ),
    "prune": Command("tensorkeep.cli.prune:prune", "Delete old steps of a training run."),
    "env": Command(
        "tensorkeep.cli.env:env", "Show versions, the coder in use, hardware and file system, for a bug report."
    ),
    "bench checkpoint": Command(
        "tensorkeep_bench.cli.measure:checkpoint",
        "Compare ways to save and load a checkpoint.",
        BENCH,
        ("suite", "compare", "run_phase4_streamlined", "phase4_optimization_testing"),
    ),
    "bench claims": Command(
        "tensorkeep_bench.cli.measure:claims", "Check published claims about checkpoint formats on this machine.", BENCH
    ),
    "bench training": Command(
        "tensorkeep_bench.cli.measure:training",
        "Compare training techniques and settings of a recipe.",
        BENCH,
        ("benchmark", "benchmarks", "benchmark_torch_compile", "run_optimization_tests"),
    ),
    "data prepare": Command(
        "chatgot.cli.data:prepare", "Tokenize text for a training run.", TRAINER, ("prepare", "process", "preprocess")
    ),
    "data info": Command("chatgot.cli.data:info", "Show the contents of a folder of prepared data.", TRAINER),
    "train": Command(
        "chatgot.cli.train:train",
        "Train a model, resume a run, or branch from one.",
        TRAINER,
        ("pipeline", "train_optimized", "train_with_samples", "trainer", "finetune"),
    ),
    "generate": Command(
        "chatgot.cli.generate:generate",
        "Continue a text with the model of a run, and print it as it is generated.",
        TRAINER,
        ("sample", "inference"),
    ),
    "eval": Command(
        "chatgot.cli.evaluate:evaluate",
        "Measure the model of a run on a text, or on multiple-choice questions.",
        TRAINER,
    ),
    "chat": Command("chatgot.cli.chat:chat", "Talk with a model that was trained on conversations.", TRAINER),
    "export": Command("chatgot.cli.export:export", "Export the model of a run for Hugging Face transformers.", TRAINER),
    "report": Command(
        "tensorkeep_bench.cli.report:report", "Print the tables of a results file and write its report.", BENCH
    ),
    "tune checkpoint": Command(
        "tensorkeep_bench.cli.tune:checkpoint", "Find the settings that save fastest in a folder.", BENCH
    ),
    "tune training": Command(
        "tensorkeep_bench.cli.tune:training",
        "Find the techniques and the batch size that fit into a memory limit.",
        BENCH,
    ),
    "demo": Command(
        "tensorkeep_bench.cli.demo:demo", "Show on this machine what Tensorkeep does, in about two minutes.", BENCH
    ),
    "completion": Command("tensorkeep.cli.shell:completion", "Print the completion script of a shell."),
    "man": Command("tensorkeep.cli.shell:man", "Print the manual page, in the language of man."),
}

GROUPS = {
    "data": "Prepare text for training.",
    "bench": "Measure on this machine, and recommend what to use.",
    "tune": "Find the best settings for this machine.",
}

# Examples for ``--help`` and the manual page. A test parses every example.
_EXAMPLES = """
tensorkeep info model.safetensors
tensorkeep info run
tensorkeep info run@1200 --largest 20 --json
tensorkeep ls model.safetensors
tensorkeep ls run@best 'model.layers.0.*' --long
tensorkeep log run
tensorkeep log run --last 50 --metric validation_loss
tensorkeep log run --verify
tensorkeep show model.safetensors --open
tensorkeep show run --out run.html
tensorkeep show run@1000 run@2000
tensorkeep show s3://bucket/run@best --sample 200MB
tensorkeep verify model.safetensors
tensorkeep verify run
tensorkeep verify run/checkpoints/step-* --json
tensorkeep diff old.pt new
tensorkeep diff run@1000 run@2000 --select 'model.*'
tensorkeep diff a.safetensors b.safetensors --rtol 1e-3
tensorkeep convert old.pt new --to native
tensorkeep convert old.pt small --to native --compression lossless
tensorkeep convert run@best x.safetensors --to safetensors --select 'model.*'
tensorkeep prune run --keep-last 3 --dry-run
tensorkeep prune run --keep-last 3 --keep-best 1 --metric loss
tensorkeep prune run --keep-every 1000 --yes
tensorkeep env
tensorkeep env --path /data --json
tensorkeep bench checkpoint --list
tensorkeep bench checkpoint --from model.safetensors --dir /data
tensorkeep bench checkpoint --experiment six-way --runs 5 --out results
tensorkeep bench claims
tensorkeep bench claims --dir /data --runs 3
tensorkeep bench training --recipe shakespeare-char-cpu --steps 50
tensorkeep bench training --list
tensorkeep data prepare my-text.txt --out data
tensorkeep data prepare 'books/*.txt' --out data --tokenizer bpe
tensorkeep data prepare stdlib --out data
tensorkeep data info data
tensorkeep data info data --verify --json
tensorkeep train shakespeare-char-cpu --data my-text.txt --out run
tensorkeep train shakespeare-char-cpu --data my-text.txt --optim.lr 3e-4
tensorkeep train --out run --resume --loop.steps 4000
tensorkeep train --branch run@2000 --out longer --loop.steps 4000
tensorkeep generate run --prompt 'Once upon'
tensorkeep generate run --which best --tokens 500 --temperature 0.7
tensorkeep eval run
tensorkeep eval run@best --data book.txt --json
tensorkeep eval run --multiple-choice hellaswag_val.jsonl
tensorkeep chat run
tensorkeep chat run --system 'Be brief.' --temperature 0.7 --min-p 0.05
tensorkeep export run --out for-transformers
tensorkeep export run --which best --out hf --dtype bfloat16
tensorkeep report results.json
tensorkeep report results --out report.html --csv tables
tensorkeep tune checkpoint /data
tensorkeep tune checkpoint /data --from model.safetensors --dry-run
tensorkeep tune training shakespeare-char-cpu --memory 4GB
tensorkeep tune training --run run --memory 4GB --predict-only
tensorkeep demo
tensorkeep demo --from model.safetensors --rounds 5
tensorkeep demo --training
source <(tensorkeep completion bash)
tensorkeep completion zsh > ~/.zfunc/_tensorkeep
tensorkeep completion fish > ~/.config/fish/completions/tensorkeep.fish
tensorkeep man > ~/.local/share/man/man1/tensorkeep.1
tensorkeep man | man -l -
"""


def _examples() -> dict[str, tuple[str, ...]]:
    lines = _EXAMPLES.strip().splitlines()
    # An example may be part of a shell command: source <(tensorkeep completion bash).
    words = {line: line.partition("tensorkeep ")[2].replace(")", " ").split() for line in lines}
    found = {
        name: tuple(line for line in lines if words[line][: name.count(" ") + 1] == name.split()) for name in COMMANDS
    }
    # A group has the first example of every command in it.
    groups = {group: tuple(found[name][0] for name in COMMANDS if name.startswith(f"{group} ")) for group in GROUPS}
    return found | groups | {"": tuple(found[name][0] for name in ("info", "verify", "convert", "demo"))}


EXAMPLES = _examples()


def command_meant(tokens: Sequence[str]) -> str | None:
    """Return an example of the command that words of another program lead to; None if they lead to none.

    Examples
    --------
    >>> command_meant(["pipeline.py", "--stage", "generate"])
    "tensorkeep generate run --prompt 'Once upon'"
    """
    stage = dict(pairwise(tokens)).get("--stage", "")
    names = {word: name for name, command in COMMANDS.items() for word in (name, *command.also)}
    # A stage says more than the name of its program.
    words = (stage, PurePath(tokens[0]).name.removesuffix(".py"))
    found = next((names[word] for word in words if word in names), None)
    # The file of an experiment, with or without a word before it.
    file = next((token for token in tokens if token.endswith(".json")), None)
    if file is not None and found in (None, "bench checkpoint"):
        return f"tensorkeep bench checkpoint --experiment {shlex.quote(file)}"
    return EXAMPLES[found][-1 if found == "bench checkpoint" else 0] if found else None


def epilogue(command: str, program: str = CORE) -> str:
    examples = [line.replace(f"{CORE} ", f"{program} ") for line in EXAMPLES.get(command, ())]
    return "\n".join(["Examples:", *(f"  {line}" for line in examples)]) if examples else ""


def summaries(commands: Mapping[str, Command]) -> dict[str, str]:
    """Return the text of each command and each group in the list of commands."""
    found: dict[str, str] = {}
    for name, command in commands.items():
        group, _, _ = name.rpartition(" ")
        # All commands of a group are in one package.
        about = command._replace(summary=GROUPS.get(group, f"Commands of {command.package}.")) if group else command
        found.setdefault(group or name, about.marked_summary)
    return found


# The flags that a program has without a command.
_FLAGS = {"--help (-h)": "Display this message and exit.", "--version (-V)": "Display application version."}
_ASCII = str.maketrans("╭╮╰╯─│", "++++-|")


def overview(program: str, description: str, notes: str, commands: Mapping[str, Command]) -> str | None:
    """Return what ``--help`` prints without a command; None if a terminal is too narrow for it.

    The text is the same as cyclopts'. The imports of cyclopts and rich take twice as long as everything else.
    """
    rows = summaries(commands) | _FLAGS
    width, names = columns(), max(map(len, rows))
    space = width - names - 6
    longest = max(len(word) for summary in rows.values() for word in summary.split())
    if names > math.ceil(width * 0.35) or longest > space:
        return None  # cyclopts breaks names and words
    bold, cyan, end = ("\x1b[1m", "\x1b[36m", "\x1b[0m") if has_colours() else ("", "", "")
    lines = [f"{bold}Usage: {program} COMMAND{end}", "", *_filled(description, width), ""]
    lines.append(f"╭─ Commands {'─' * (width - 13)}╮")
    for name, summary in rows.items():
        for number, text in enumerate(_filled(summary, space)):
            lines.append(f"│ {cyan}{'' if number else name:{names}}{end}  {text:{space}} │")
    lines += [f"╰{'─' * (width - 2)}╯", ""]
    lines += [line for paragraph in notes.splitlines() for line in _filled(paragraph, width)]
    text = "\n".join(lines)
    # A stream of a notebook may have no encoding.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text if encoding.lower().startswith("utf") else text.translate(_ASCII)


def _filled(text: str, width: int) -> list[str]:
    """Break a text between words; like rich, keep the blank after the last word of a line where it fits."""
    lines = [""]
    for word in re.findall(r"\s*\S+\s*", text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line if len(line.rstrip()) > width else line[:width] for line in lines]


def add_commands(app: "App", commands: Mapping[str, Command]) -> None:
    """Add commands, which are imported when they run. A name of two words is a command of a group."""
    from cyclopts import App

    groups: dict[str, App] = {}
    program, about = app.name[0], summaries(commands)
    for position, (name, command) in enumerate(commands.items()):
        group, _, word = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(
                name=group, help=about[group], sort_key=position, help_epilogue=epilogue(group, program)
            )
            app.command(groups[group])
        # Without its package, a command is still listed, and raises an error that names the package.
        groups.get(group, app).command(
            command.target if command.installed else _not_installed(name, command),
            name=word,
            help=command.marked_summary,
            sort_key=position,
            help_epilogue=epilogue(name, program),
        )


def _not_installed(name: str, command: Command) -> Callable[..., NoReturn]:
    from cyclopts import Parameter

    missing = f"tensorkeep {name} is a command of {command.package}, which is not installed"

    # It takes any arguments, because the options of the command are not known.
    def refuse(*_: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> NoReturn:
        raise MissingExtraError(missing, remedy=installation_of(command.package))

    # Its `--help` shows the docstring.
    refuse.__doc__ = f"{command.marked_summary}\n\n{missing}; {installation_of(command.package)}"
    return refuse


def plug_in_commands() -> dict[str, Command]:
    """Return the commands that installed packages add by entry points. None can replace a command of `COMMANDS`.

    The dot in the name of an entry point becomes a space::

        [project.entry-points."tensorkeep.commands"]
        "bench.checkpoint" = "tensorkeep_bench.cli.measure:checkpoint"
    """
    # Only here: this import takes a tenth of the time of a short command.
    from importlib.metadata import entry_points

    # Names of entry points have no blanks by convention.
    found = {entry.name.replace(".", " "): entry for entry in entry_points(group="tensorkeep.commands")}
    packages = {name: entry.dist.name if entry.dist else entry.module for name, entry in found.items()}
    return {
        name: Command(entry.value, f"A command of {packages[name]}.", package=packages[name])
        for name, entry in sorted(found.items())
        if name not in COMMANDS
    }
