"""For commands of the command line: options, output and tables."""

from tensorkeep.cli.errors import Interrupted
from tensorkeep.cli.main import main
from tensorkeep.cli.options import SIZE, AtLeastOne, AtLeastZero, Checkpoint, Run, Size, Switch, Which
from tensorkeep.cli.output import DEFAULT, Counter, Output, counter
from tensorkeep.cli.text import Table, columns, print_lines, printable, printable_text, ratio

__all__ = [
    "DEFAULT",
    "SIZE",
    "AtLeastOne",
    "AtLeastZero",
    "Checkpoint",
    "Counter",
    "Interrupted",
    "Output",
    "Run",
    "Size",
    "Switch",
    "Table",
    "Which",
    "columns",
    "counter",
    "main",
    "print_lines",
    "printable",
    "printable_text",
    "ratio"
]  # fmt: skip
