"""``tensorkeep completion`` and ``tensorkeep man``: generated from the same texts as ``--help``."""

import re
from typing import Literal

from tensorkeep.cli.main import COMMANDS, EPILOGUE, build_app
from tensorkeep.cli.manual import manual_page
from tensorkeep.cli.output import DEFAULT, Output

_ZSH_POSITIONAL = re.compile(r"^( *'(?:\d+|\*):(?:[^'\\:]|\\.|'\\'')+)'", re.MULTILINE)
"""A positional argument of the script for zsh for which nothing is completed yet."""

_ZSH_END = """
if [[ $funcstack[1] == _tensorkeep ]]; then
  _tensorkeep "$@"  # loaded from a folder in fpath
else
  compdef _tensorkeep tensorkeep  # sourced
fi"""


def completion(shell: Literal["bash", "zsh", "fish"], /, *, output: Output = DEFAULT) -> None:
    """Print the completion script of a shell.

    Parameters
    ----------
    shell
        The shell that the script is for. Write it to a file: for bash in ~/.local/share/bash-completion/completions;
        for zsh named _tensorkeep, in a folder in fpath; for fish in ~/.config/fish/completions.
    """
    script = _completed(build_app().generate_completion(shell=shell), shell)
    output.show({"shell": shell, "script": script}, lambda: print(script))


def _completed(script: str, shell: str) -> str:
    """Return a script that also completes files for checkpoints and runs, whose options are not typed as paths."""
    if shell == "bash":
        return script.replace("complete -F", "complete -o bashdefault -o default -F")
    if shell == "zsh":
        # A function of the name of its file, which may also be sourced.
        return _ZSH_POSITIONAL.sub(r"\1:_files'", script.replace("_cyclopts_tensorkeep", "_tensorkeep")) + _ZSH_END
    return script


def man(*, output: Output = DEFAULT) -> None:
    """Print the manual page, in the language of man."""
    page = manual_page(build_app, [*COMMANDS], EPILOGUE)
    output.show({"page": page}, lambda: print(page, end=""))
