"""Record the program of the root's README, killed and resumed, in ``docs/kill-resume-diff.svg``.

``python benchmarks/recording.py`` runs the commands in an empty folder, as a shell would, and draws what they print.
Tests check that the drawing belongs to the commands, and that they still print it.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from html import escape, unescape
from pathlib import Path

from chart import STYLE

ROOT = Path(__file__).parents[3]
RECORDING = ROOT / "docs" / "kill-resume-diff.svg"
KILLED_AFTER = 200
"""`kill -9` comes as soon as the checkpoint of this step is visible."""
COMMANDS = (
    "python train.py > /dev/null; mv run whole  # never killed",
    f"python train.py  # kill -9 after step {KILLED_AFTER}",
    "python train.py",
    "tensorkeep diff whole@300 run@300 --select 'model.*'",
)
WIDTH, LEFT, TOP, LINE = 720, 22, 36, 22
MONOSPACE = "text { font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; white-space: pre }\n"


def program() -> str:
    """Return the first program of the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    return found[1]


def record(folder: Path) -> list[str]:
    """Return what a terminal shows: the commands and their output."""
    (folder / "train.py").write_text(program())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lines = []
    for command in COMMANDS:
        lines.append(f"$ {command}")
        killed = "kill -9" in command
        shell = subprocess.Popen(
            # The signal is for the program, so that is what bash becomes.
            ["bash", "-c", f"exec {command}" if killed else command],
            cwd=folder,
            env={**os.environ, "PATH": path},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if killed:
            while shell.poll() is None and not (folder / f"run/step-{KILLED_AFTER:06}").exists():
                time.sleep(0.001)
            shell.kill()
        lines += shell.communicate()[0].splitlines()
        # What an interactive bash prints.
        lines += ["Killed"] if shell.returncode < 0 else []
    return lines


def drawn(lines: list[str]) -> str:
    """Return a terminal with these lines as SVG."""
    height = TOP + LINE * len(lines)
    top = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        "<title>A run is killed, resumes, and ends with the weights of a run that was never killed</title>",
        f"<style>{STYLE}{MONOSPACE}</style>",
        f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>',
    ]
    texts = []
    for number, line in enumerate(lines):
        kind = ' class="h"' if line.startswith("$") else ""
        command, mark, comment = line.partition("  # ")
        words = escape(command) + (f'<tspan class="q">{mark}{escape(comment)}</tspan>' if mark else "")
        texts.append(f'<text{kind} x="{LEFT}" y="{TOP + LINE * number}">{words}</text>')
    return "\n".join([*top, *texts, "</svg>", ""])


def shown(svg: str) -> list[str]:
    """Return the lines of a drawing."""
    texts = re.findall(r"<text.*?>(.*)</text>", svg)
    return [unescape(re.sub(r"</?tspan.*?>", "", text)) for text in texts]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        RECORDING.write_text(drawn(record(Path(made))))
