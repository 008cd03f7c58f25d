"""The program ``chatgot``: the commands of the trainer, without the others of ``tensorkeep``."""

from tensorkeep.ext.cli import main as command_line


def main() -> int:
    return command_line(name="chatgot", description="A compact GPT trainer that resumes exactly.")
