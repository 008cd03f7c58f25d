"""``tensorkeep data``: its output for people and programs."""

import json
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from tensorkeep.cli import data
from tensorkeep.cli.output import Output
from tensorkeep.errors import CorruptCheckpointError, UsageError

TEXT = "Tensorkeep keeps what was trained.\n" * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path / "a.txt"


def test_prepare_shows_its_result_and_the_next_command(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text.parent / "my data"
    data.prepare(str(text), out=out)
    shown = capsys.readouterr().out
    assert "char tokens of" in shown
    assert "(1 file, 1.40 kB of utf-8, 1,400 characters)" in shown
    assert shown.splitlines()[3].split() == ["split", "tokens"]
    assert shown.splitlines()[4].split() == ["train", "1,260"]
    assert shown.splitlines()[5].split() == ["validation", "140"]
    assert shown.endswith(f"next: tensorkeep train shakespeare-char-cpu --data '{out}'\n")


def test_preparing_as_json(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text.parent / "data"
    data.prepare(str(text), out=out, tokenizer="byte", validation=0.5, output=Output(json=True))
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(out)
    assert document["splits"]["validation"]["tokens"] == 700
    assert document["vocab_size"] == 256
    assert document["next"].startswith("tensorkeep train")


def test_documents_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    data.prepare(str(tmp_path / "d.jsonl"), out=tmp_path / "data")
    shown = capsys.readouterr().out
    assert "split" in shown
    counts = [line.split() for line in shown.splitlines()[4:6]]
    assert sum(int(count[2]) for count in counts) == 40


def test_info_shows_a_sample(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text.parent / "data"
    data.prepare(str(text), out=out, output=Output(quiet=True))
    assert capsys.readouterr().out == ""
    data.info(out)
    shown = capsys.readouterr().out
    assert "verified" not in shown
    assert shown.endswith("Tensorkeep keeps what was trained.\nTensorkeep keeps what was\n")
    data.info(out, verify=True, output=Output(json=True))
    document = json.loads(capsys.readouterr().out)
    assert document["verified"] is True
    assert document["sample"] == TEXT[:200]
    data.info(out, verify=True)
    assert "verified: the checksum" in capsys.readouterr().out


def test_a_sample_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("\x1b[2J\x07" * 40)
    data.prepare(str(tmp_path / "a.txt"), out=tmp_path / "data")
    data.info(tmp_path / "data")
    assert "\x1b" not in capsys.readouterr().out


def test_damage_is_found(text: Path) -> None:
    out = text.parent / "data"
    data.prepare(str(text), out=out, output=Output(quiet=True))
    content = bytearray((out / "train.bin").read_bytes())
    content[0] ^= 1
    (out / "train.bin").write_bytes(content)
    data.info(out, output=Output(quiet=True))
    with pytest.raises(CorruptCheckpointError):
        data.info(out, verify=True)
    with pytest.raises(UsageError, match="vocabulary size"):
        data.prepare(str(text), out=out, vocab_size=100)


def test_the_options_are_those_documented() -> None:
    app = App()
    app.command(data.prepare, name="prepare")
    app.command(data.info, name="info")
    line = "prepare - --tokenizer bpe --vocab-size 300 --validation 0.2 --seed 3 --encoding latin-1 --out x --overwrite"
    _, bound, _ = app.parse_args(line.split(), exit_on_error=False, print_error=False)
    assert bound.args == ("-",)
    assert bound.kwargs == {
        "tokenizer": "bpe",
        "vocab_size": 300,
        "validation": 0.2,
        "seed": 3,
        "encoding": "latin-1",
        "out": Path("x"),
        "overwrite": True,
    }
    with pytest.raises(CycloptsError, match="--ouy"):
        app.parse_args(["prepare", "--ouy", "--out", "x"], exit_on_error=False, print_error=False)
    _, bound, _ = app.parse_args(["info", "x", "--verify"], exit_on_error=False, print_error=False)
    assert (bound.args, bound.kwargs) == ((Path("x"),), {"verify": True})
