"""The text of ``tensorkeep demo``, printed stage by stage."""

import textwrap
from dataclasses import dataclass

from tensorkeep.cli.output import Output
from tensorkeep.cli.text import Table, printable


@dataclass(frozen=True, slots=True)
class DemoText:
    """Prints text as the stages end; prints nothing with ``--json`` or ``--quiet``."""

    output: Output

    def paragraph(self, *sentences: str) -> None:
        """Print an empty line and some texts, each wrapped at 79 columns; names and paths are never broken."""
        wrapped = (
            textwrap.fill(printable(text), 79, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)
            for text in sentences
        )
        self._print("", *wrapped)

    def lines(self, *lines: str) -> None:
        """Print lines as they are."""
        self._print(*map(printable, lines))

    def table(self, table: Table) -> None:
        """Print an empty line and a table."""
        self._print("")
        if self._shown:
            table.show()

    @property
    def _shown(self) -> bool:
        return not (self.output.json or self.output.quiet)

    def _print(self, *lines: str) -> None:
        if self._shown:
            print("\n".join(lines), flush=True)
