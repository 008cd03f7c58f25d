"""``tensorkeep completion`` and ``tensorkeep man``: generated from the same texts as ``--help``."""

from typing import Literal

from tensorkeep.cli.main import COMMANDS, EPILOGUE, GROUPS, build_app
from tensorkeep.cli.manual import manual_page
from tensorkeep.cli.output import DEFAULT, Output


def completion(shell: Literal["bash", "zsh", "fish"], /, *, output: Output = DEFAULT) -> None:
    """Print the completion script of a shell.

    Parameters
    ----------
    shell
        The shell that the script is for. For bash, the line of the example may stand in ~/.bashrc, or a file of the
        script in ~/.local/share/bash-completion/completions; for zsh, the folder of the file must be in fpath.
    """
    script = build_app().generate_completion(shell=shell)
    output.show({"shell": shell, "script": script}, lambda: print(script))


def man(*, output: Output = DEFAULT) -> None:
    """Print the manual page, in the language of man."""
    page = manual_page(build_app, [*COMMANDS], GROUPS, EPILOGUE)
    output.show({"page": page}, lambda: print(page, end=""))
