"""Tables and lines on terminals of 50, 80 and 140 columns: no line is wider, no word broken, numbers are complete."""

import os
import re
import sys
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.cli.text import Table, columns, elided, print_lines, print_verdict, printable, printable_text

pytestmark = pytest.mark.usefixtures("quick_training")

WIDTHS = (50, 80, 150)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NAME = "model.layers.{}.self_attention.query_key_value.weight"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what a call prints into a pipe (width 0), or on a terminal of a width; if asked, with the errors."""

    def show(call: Callable[[], object], width: int = 0, errors: bool = False) -> str:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda: bool(width))
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", str(width or 80))
            patch.setenv("LINES", "25")
            patch.delenv("NO_COLOR", raising=False)
            call()
        found = capsys.readouterr()
        return found.out + found.err * errors

    return show


def test_control_characters_are_escaped_in_generated_text_and_in_names(shown: Callable[..., str]) -> None:
    text = "\tx = 1\n\N{IDEOGRAPHIC SPACE}\N{NO-BREAK SPACE}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{MICROSCOPE}"
    assert printable_text(text) == text
    hostile = "\x1b[2J\r\x9b\N{RIGHT-TO-LEFT OVERRIDE}\N{POP DIRECTIONAL ISOLATE}\x00"
    assert printable_text(hostile) == r"\x1b[2J\r\x9b\u202e\u2069\x00"
    assert shown(Table(("name",), [("\x1b[31mred\u202e\n",)]).show) == "name\n\\x1b[31mred\\u202e\\n\n"
    assert printable("größe 大") == "größe 大"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints that differ, a run of saved steps, text and prepared data."""
    folder = tmp_path_factory.mktemp("widths")
    model = {NAME.format(number): torch.full((8, 8), float(number)) for number in range(12)}
    optimizer = {"state": {NAME.format(number): torch.ones(8) for number in range(12)}, "step": 100}
    tensorkeep.save({"model": model, "optimizer": optimizer}, folder / "a", metadata={"description": "long words " * 9})
    changed = {name: tensor + 1 for name, tensor in model.items()}
    tensorkeep.save({"model": changed, "optimizer": {**optimizer, "step": 200}}, folder / "b")
    with tensorkeep.CheckpointManager(folder / "run", incremental=True) as manager:
        for step in (100, 200, 300):
            metrics = {"validation_loss": 1 / step, "accuracy_of_the_validation_split": step / 1000}
            manager.save(step, {"model": model}, metrics)
    (folder / "text.txt").write_text("she sells sea shells on the sea shore; " * 60)
    assert main(["data", "prepare", str(folder / "text.txt"), "--out", str(folder / "data"), "-q"]) == 0
    return folder


COMMANDS = """
info a; info run; ls a; ls a --long; log run; diff a b; show a; show run; show a b; verify a b; data info data; env
prune run --keep-last 1 --dry-run; train --list-recipes; train shakespeare-char-cpu --list-settings
train --list-techniques; bench checkpoint --list; bench training --list
"""


def test_tables_of_verdicts_fit_the_terminal(shown: Callable[..., str]) -> None:
    results = Path(__file__).parents[2] / "packages/tensorkeep-bench/benchmarks/results/isolated-bfloat16.json.gz"

    def report() -> None:
        assert main(["report", str(results), "--tables-only"]) == 0

    for width in WIDTHS:
        # The comparison before it is the text of a fixed format.
        text = COLOURS.sub("", shown(report, width)).partition("\ndurable save\n")[2]
        assert [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1] == []
        heading = text.splitlines()[0].split()
        assert heading[:2] == ["arm", "verdict"] and "gain" in heading
        assert ("runs" in heading) == (width == 150)


def words(text: str) -> set[str]:
    return set(COLOURS.sub("", text).split())


@pytest.mark.parametrize("command", re.split("; |\n", COMMANDS.strip()))
def test_output_fits_the_terminal(
    place: Path, monkeypatch: pytest.MonkeyPatch, shown: Callable[..., str], command: str
) -> None:
    monkeypatch.chdir(place)
    # Pages are not what is tested, and take longer than the text.
    monkeypatch.setattr("tensorkeep.cli.show.write_page", lambda *_: 1000)
    complete = words(shown(lambda: main(command.split())))
    for width in WIDTHS:
        text = COLOURS.sub("", shown(lambda: main(command.split()), width))
        lines = text.splitlines()
        assert text.strip()
        assert [line for line in lines if len(line) > width and len(line.split()) > 1] == []
        more = words(re.sub(r"\(not shown in [^)]*\)", "", text)) - complete
        # Times and rates differ between two calls.
        broken = {word for word in more if "…" not in word and not re.search(r"\d|^[KMGT]?i?B/s", word)}
        assert broken <= {"s", "ms", "us"}, sorted(broken)


POISON = "\x1b]0;owned\x07\x9b2J\r\n\u202e\u2066"
POISONED = f"""
info a; info {POISON}.safetensors; info {POISON}.pt; info run; ls a; ls a --long; ls {POISON}.safetensors; log run
diff a b; diff a {POISON}.pt; show a; show a b; verify a b; prune run --keep-last 1 --dry-run; convert a {POISON}2.pt
ls a --select {POISON}x; convert a {POISON}.pt; info {POISON}.other; verify {POISON}.txt; data info {POISON}
data prepare {POISON}.txt --out {POISON}; train {POISON}; train shakespeare-char-cpu --set {POISON}=1
convert 1.pt c; convert 2.pt c
"""


def test_no_text_of_a_file_or_an_argument_controls_the_terminal(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tensorkeep.cli.show.write_page", lambda *_: 1000)
    state = {POISON: {POISON: torch.ones(2), "text": POISON}, "model": {f"{POISON}.w": torch.zeros(3)}}
    tensorkeep.save(state, "a", metadata={POISON: POISON})
    tensorkeep.save({**state, POISON: {POISON: torch.zeros(2), "text": POISON * 2}}, "b")
    with tensorkeep.CheckpointManager("run") as manager:
        for step in (1, 2):
            manager.save(step, state, {POISON: step})
    tensorkeep.convert("b", f"{POISON}.pt")
    for number, name in enumerate(("E\x1b]", 'E"'), 1):
        monkeypatch.setattr(sys.modules[__name__], name, type(name, (), {"__module__": __name__}), raising=False)
        torch.save(getattr(sys.modules[__name__], name)(), f"{number}.pt")
    save_file({POISON: torch.ones(2)}, f"{POISON}.safetensors", {POISON: POISON})
    Path(f"{POISON}.txt").write_text(POISON * 9)
    for command in re.split("; |\n(?=[a-z])", POISONED.strip()):
        # Errors do not depend on the width.
        for width in (WIDTHS[0], 0) if command[:3] in ("log", "ls ", "inf", "dif") else (WIDTHS[0],):
            text = COLOURS.sub("", shown(partial(main, command.split(" ")), width, errors=True))
            assert text.strip()
            assert not [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")], (command, text)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("model.layers.0.weight", 30, "model.layers.0.weight"),
        ("model.layers.11.self_attn.q_proj.weight", 24, "model.layers.11.s…weight"),
        ("model.layers.11.self_attn.q_proj.weight", 32, "model.layers.11.se…q_proj.weight"),
        ("/data/runs/one/checkpoints/step-000100", 20, "/data/run…tep-000100"),
        ("x" * 30, 11, "xxxxx…xxxxx"),
    ],
)
def test_long_names_are_shortened_in_the_middle(text: str, width: int, expected: str) -> None:
    assert len(elided(text, width)) <= width
    assert elided(text, width) == expected


def test_tables_on_a_narrow_terminal_keep_their_numbers(shown: Callable[..., str]) -> None:
    table = Table(("name", ">bytes"), [(NAME.format(0), "1,234,567,890"), (NAME.format(1), "5")])
    lines = COLOURS.sub("", shown(table.show, 40)).splitlines()
    assert [len(line) for line in lines] == [40, 40, 40]
    assert [line.split()[-1] for line in lines] == ["bytes", "1,234,567,890", "5"]
    assert lines[1].startswith("model.layers.0") and "…" in lines[1]
    # Spare columns are left out and named.
    table = Table(("name", ">a number", ">another number"), [("x" * 30, "1" * 16, "2" * 16)], spare=("another number",))
    text = COLOURS.sub("", shown(table.show, 46))
    assert "222" not in text and text.rstrip().endswith("(not shown in 46 columns: another number)")
    # Rows that do not fit become lists.
    table = Table((">first", ">second", ">third"), [("1" * 20, "2" * 20, "3" * 20), ("4", "5", "6")])
    found = [line.split() for line in shown(table.show, 40).splitlines() if line.strip()]
    names = ("first", "second", "third")
    assert found == [[name, cell] for row in table.rows for name, cell in zip(names, row, strict=True)]


def test_lines_are_wrapped_between_words_on_a_terminal_only(shown: Callable[..., str]) -> None:
    line = f"  one two {'x' * 30} three"
    assert shown(lambda: print_lines(line)) == f"{line}\n"
    assert shown(lambda: print_lines(line), 20).splitlines() == ["  one two", f"    {'x' * 30}", "    three"]


def test_verdicts_are_coloured_on_a_terminal_unless_no_color_is_set(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for good, code in ((True, "32"), (False, "31"), (None, "33")):
        show = partial(print_verdict, "verdict", ": why", good=good)
        assert shown(show) == "verdict: why\n"
        assert shown(show, 80) == f"\x1b[{code}mverdict\x1b[0m: why\n"
    assert shown(lambda: (monkeypatch.setenv("NO_COLOR", "1"), show()), 80) == "verdict: why\n"
    rows = [("a", "helps"), ("b", "hurts"), ("c", "within noise"), ("d", "baseline")]
    text = shown(Table(("=arm", "=verdict"), rows).show, 80)
    assert "\x1b[32mhelps" in text and "\x1b[31mhurts" in text and "\x1b[33mwithin noise" in text
    assert COLOURS.sub("", text).splitlines()[-1].split() == ["d", "baseline"]


def test_the_width_is_the_one_of_any_stream_that_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {0: 61, 2: 70}

    def size(stream: int) -> os.terminal_size:
        if stream not in widths:
            raise OSError
        return os.terminal_size((widths[stream], 24))

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", size)
    # Standard output goes to a pager or a file; then standard input, too.
    assert columns() == 61
    del widths[0]
    assert columns() == 70
    widths.clear()
    assert columns() == 80
    monkeypatch.setenv("COLUMNS", "50")
    assert columns() == 50
