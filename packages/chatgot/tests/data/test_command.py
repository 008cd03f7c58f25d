"""``tensorkeep data``: its output for people and programs."""

import json
import shlex
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError

from chatgot.cli import data
from faults.injection import flip_bit
from tensorkeep.cli.output import Output
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UsageError
from tiny_training import follow

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
    found = [line.split() for line in shown.splitlines()[3:6]]
    assert found == [["split", "tokens"], ["train", "1,260"], ["validation", "140"]]
    assert shown.endswith(f"next: tensorkeep train shakespeare-char-cpu --data '{out}'\n")
    # Documents are counted.
    (text.parent / "d.jsonl").write_text("\n".join(json.dumps({"text": f"document {number}"}) for number in range(40)))
    data.prepare(str(text.parent / "d.jsonl"), out=text.parent / "documents")
    counts = [line.split() for line in capsys.readouterr().out.splitlines()[4:6]]
    assert sum(int(count[2]) for count in counts) == 40
    out = text.parent / "data"
    options = data.PrepareOptions(tokenizer="byte", validation=0.5)
    data.prepare(str(text), out=out, options=options, output=Output(json=True))
    document = json.loads(capsys.readouterr().out)
    assert (document["path"], document["vocab_size"]) == (str(out), 256)
    assert document["splits"]["validation"]["tokens"] == 700
    assert document["next"].startswith("tensorkeep train")


def test_info_shows_a_sample_and_damage_is_found(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    flip_bit(out / "train.bin", 0)
    data.info(out, output=Output(quiet=True))
    with pytest.raises(CorruptCheckpointError):
        data.info(out, verify=True)
    with pytest.raises(UsageError, match="vocabulary size"):
        data.prepare(str(text), out=out, options=data.PrepareOptions(vocab_size=100))
    # A sample cannot drive the terminal.
    text.write_text("\x1b[2J\x07" * 40)
    data.prepare(str(text), out=text.parent / "other")
    data.info(text.parent / "other")
    assert "\x1b" not in capsys.readouterr().out


def test_remedies_are_followed_and_arguments_without_effect_noted(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tmp_path = text.parent / "it's [a] folder", text.parent
    folder.mkdir()
    (folder / "a.log").write_bytes(b"\xe9" * 100)
    with pytest.raises(NotACheckpointError, match="holds no text files") as raised:
        data.prepare(str(folder), out=tmp_path / "none")
    pattern = shlex.split(str(raised.value.remedy).partition("such as ")[2].partition(";")[0])
    with pytest.raises(UsageError, match="is not utf-8") as refused:
        data.prepare(*pattern, out=tmp_path / "none")
    follow(str(refused.value.remedy), SOURCE=folder / "a.log", NEW=tmp_path / "a")
    (folder / "d.jsonl").write_text('{"body": "to be"}\n' * 40)
    with pytest.raises(UsageError, match=r"--field NAME \(tensorkeep train: --data.field NAME\)"):
        data.prepare(str(folder), out=tmp_path / "none")
    data.prepare(str(folder), out=tmp_path / "d", options=data.PrepareOptions(field="body"))
    data.prepare(str(text), out=tmp_path / "t", options=data.PrepareOptions(field="body", seed=3))
    notes = capsys.readouterr().err
    for note in (
        "1 of 2 files are left out, by the ends of their names: .log (1)",
        "field 'body' has no",
        "seed 3 has no",
    ):
        assert note in notes, notes
    (folder / "d.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(UsageError, match="convert the file to UTF-8, as JSON is"):
        data.prepare(str(folder / "d.jsonl"), out=tmp_path / "none")


def test_the_options_are_those_documented() -> None:
    app = App()
    app.command(data.prepare, name="prepare")
    app.command(data.info, name="info")
    line = "prepare - --tokenizer bpe --vocab-size 300 --validation 0.2 --seed 3 --encoding latin-1 --out x --overwrite"
    _, bound, _ = app.parse_args(line.split(), exit_on_error=False, print_error=False)
    assert bound.args == ("-",)
    numbers = {"vocab_size": 300, "validation": 0.2, "seed": 3}
    options = data.PrepareOptions(tokenizer="bpe", encoding="latin-1", overwrite=True, **numbers)
    assert bound.kwargs == {"out": Path("x"), "options": options}
    with pytest.raises(CycloptsError, match="--ouy"):
        app.parse_args(["prepare", "--ouy", "--out", "x"], exit_on_error=False, print_error=False)
    _, bound, _ = app.parse_args(["info", "x", "--verify"], exit_on_error=False, print_error=False)
    assert (bound.args, bound.kwargs) == ((Path("x"),), {"verify": True})
