"""``tensorkeep completion`` and ``tensorkeep man``, generated from the texts of ``--help``."""

import re
from typing import Literal

from tensorkeep.cli.commands import COMMANDS
from tensorkeep.cli.help import manual_page
from tensorkeep.cli.main import EPILOGUE, build_app
from tensorkeep.cli.output import DEFAULT, Output

# A positional argument in the zsh script that has no completion yet.
_ZSH_POSITIONAL = re.compile(r"^( *'(?:\d+|\*):(?:[^'\\:]|\\.|'\\'')+)'", re.MULTILINE)

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
    script = build_app().generate_completion(shell=shell)
    # cyclopts completes files only for options of the type Path. Checkpoints and runs are strings, for their URLs.
    if shell == "bash":
        script = script.replace("complete -F", "complete -o bashdefault -o default -F")
    elif shell == "zsh":
        # fpath needs a function named like its file.
        script = script.replace("_cyclopts_tensorkeep", "_tensorkeep")
        script = _ZSH_POSITIONAL.sub(r"\1:_files'", script) + _ZSH_END
    output.show({"shell": shell, "script": script}, lambda: print(script))


def man(*, output: Output = DEFAULT) -> None:
    """Print the manual page, in the language of man."""
    page = manual_page(build_app(plug_ins=False), [*COMMANDS], EPILOGUE)
    output.show({"page": page}, lambda: print(page, end=""))
