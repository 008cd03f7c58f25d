"""Sources: which files are found, how they are read, and errors with file and position."""

import codecs
import io
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatgot.data import corpus
from chatgot.data.corpus import PIECE, CorpusReader, open_source
from tensorkeep.errors import NotACheckpointError, StoreError, UsageError
from tensorkeep.storage.parallel import Meter
from tensorkeep.testing.cases import case


def read(spec: str | os.PathLike[str], *, encoding: str = "utf-8") -> dict[str, str]:
    with open_source(spec, encoding=encoding) as source:
        reading = CorpusReader(source, Meter(source.nbytes, None))
        return {document.name: "".join(document.texts) for document in reading.documents()}


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def standard_input(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content))


def test_a_file_is_one_stream_and_a_folder_has_documents_in_order(tmp_path: Path) -> None:
    fill(tmp_path, {"one/a.txt": "\ufeffone\r\ntwo"})  # the mark of UTF-8 is not part of the text
    with open_source(tmp_path / "one" / "a.txt") as source:
        assert (source.kind, source.has_documents, source.nbytes) == ("file", False, 11)
    assert read(tmp_path / "one" / "a.txt") == {"a.txt": "one\r\ntwo"}
    names = ("b.md", "a/z.txt", "a/y.PY", "a.txt", "skip.bin", ".hidden.txt", ".git/x.txt")
    folder = fill(tmp_path / "many", {name: f"in {name}" for name in names})
    with open_source(folder) as source:
        assert (source.kind, source.has_documents) == ("folder", True)
    assert list(read(folder)) == ["a.txt", "a/y.PY", "a/z.txt", "b.md"]


def test_links_are_followed_and_those_in_a_circle_and_to_nowhere_are_errors(tmp_path: Path) -> None:
    fill(tmp_path, {"far/a.txt": "far", "near/b.txt": "near", "a/b/c.txt": "c"})
    for name in ("one", "two"):
        (tmp_path / "near" / name).symlink_to(tmp_path / "far")
    assert list(read(tmp_path / "near")) == ["b.txt", "one/a.txt", "two/a.txt"]
    (tmp_path / "a" / "b" / "back").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="a/b/back: is a link that leads back to a folder above it"):
        read(tmp_path)
    for name, target in (("x.txt", "y.txt"), ("y.txt", "x.txt"), ("gone.txt", "nothing")):
        (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        read(tmp_path / "x.txt")
    with pytest.raises(StoreError, match=r"gone\.txt: cannot read the file: No such file"):
        read(f"{tmp_path}/gone*")


def test_unreadable_files_and_folders_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    fill(tmp_path, {"a.txt": "a"})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match=r"a\.txt: cannot read the file: Permission denied\ncheck the permissions"):
        read(tmp_path)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match="cannot list the folder: Permission denied"):
        read(tmp_path)


def test_a_pattern_takes_every_file_it_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"x/a.log": "a", "x/y/b.log": "b", "x/c.txt": "c", "x/.d.log": "d", "a[1].txt": "itself"})
    assert list(read(f"{tmp_path}/x/*.log")) == ["a.log"]
    assert list(read(f"{tmp_path}/**/*.log")) == ["x/a.log", "x/y/b.log"]
    with open_source(f"{tmp_path}/x/[ac].*") as source:
        assert (source.kind, source.has_documents) == ("pattern", True)
    # A name that looks like a pattern is that of a file.
    assert read(tmp_path / "a[1].txt") == {"a[1].txt": "itself"}
    monkeypatch.chdir(tmp_path)
    assert read("*/a.log") == {"x/a.log": "a"}
    with pytest.raises(UsageError, match="is not a valid pattern"):
        read(f"{tmp_path}/**x/a.log")


def test_the_standard_library_without_its_tests() -> None:
    with open_source("stdlib") as source:
        names = [file.name for file in source.files]
        assert (source.kind, source.has_documents) == ("stdlib", True)
        assert source.nbytes > 1_000_000
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert names == sorted(names)
    unwanted = {"test", "tests", "site-packages", "idlelib", "__pycache__"}
    assert not any(unwanted & set(name.split("/")) for name in names)


def test_a_jsonl_file_has_a_document_on_each_line(tmp_path: Path) -> None:
    lines = [{"text": "one\n", "weight": 1.0}, {"id": 2, "text": "zwei ü", "masked": False}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    found = {name: text for name, text in read(tmp_path / "d.jsonl").items() if text}
    assert found == {"d.jsonl:1": "one\n", "d.jsonl:3": "zwei ü"}
    with open_source(tmp_path / "d.jsonl") as source:
        assert (source.kind, source.has_documents) == ("jsonl", True)
    fill(tmp_path, {"e.txt": "e"})
    assert list(read(tmp_path)) == ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3", "e.txt"]


def test_invalid_jsonl_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    for line, message in (
        (b"{", "line 2 is not a document"),
        (b"[1]", "line 2 is not a document"),
        (b'{"txt": "a"}', "missing required field `text`"),
        (b'{"text": "a", "weight": 0}', 'line 2 has "weight": 0, which is not supported: all of a document is trained'),
        (b'{"text": "a", "mask": [1]}', r'line 2 has "mask": \[1\], which is not supported'),
        (b'{"text": 3}', r"Expected `str`, got `int` - at `\$.text`"),
        (b'{"text": "\\ud800"}', "line 2 is not a document"),
        (b'{"text": "a\\u0000"}', "a character of line 2 is NUL"),
        (b'{"text": "\xff"}', r"byte 26 is not utf-8 \(invalid start byte\)"),
        (b'{"text": "\0"}', "byte 26 is NUL"),
        (b'{"text": "a", "b": ' + b"[" * 100_000, "line 2 is not a document"),
        (b'{"text": "' + b"x" * 40 + b'"}', "line 2 is longer than 40 bytes"),
    ):
        if "longer" in message:
            monkeypatch.setattr(corpus, "LONGEST_RECORD", 40)
        path.write_bytes(b'{"text": "all"}\n' + line + b"\n")
        with case(line[:20]):
            with pytest.raises(UsageError, match=message) as caught:
                read(path)
            assert (caught.value.path, caught.value.exit_code) == (str(path), 2)
    with pytest.raises(UsageError, match="JSON is UTF-8, not latin-1"):
        read(tmp_path, encoding="latin-1")


def test_standard_input_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", standard_input("grüße".encode()))
    with open_source("-") as source:
        assert (source.kind, source.has_documents, source.nbytes) == ("stdin", False, 7)
        for _ in range(2):
            reading = CorpusReader(source, Meter(source.nbytes, None))
            assert ["".join(document.texts) for document in reading.documents()] == ["grüße"]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40), st.integers(1, 9))
def test_pieces_of_bytes_never_split_a_character(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", piece)
        for encoding in ("utf-8", "utf-16", "utf-32-be"):
            patch.setattr(sys, "stdin", standard_input(text.encode(encoding)))
            expected = text.removeprefix("\ufeff") if encoding == "utf-8" else text
            assert read("-", encoding=encoding) == {"standard input": expected}


def test_undecodable_byte_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for place in (0, PIECE - 1, PIECE, 2 * PIECE + 7):
        path.write_bytes(b"a" * place + b"\xff" + b"b" * 10)
        with pytest.raises(UsageError, match=rf"a\.txt: byte {place:,} is not utf-8 \(invalid start byte\)") as caught:
            read(path)
        assert "latin-1" in str(caught.value.remedy)
        assert len(read(path, encoding="latin-1")["a.txt"]) == place + 11


def test_source_closes_the_file_of_an_interrupted_reading(tmp_path: Path) -> None:
    with open_source(fill(tmp_path, {"a.txt": "a"})) as source:
        reader = source.opened(source.files[0])
        stream = reader.__enter__()
        assert not stream.closed
    assert stream.closed


def test_broken_characters_binary_files_and_invalid_encodings_are_refused(tmp_path: Path) -> None:
    for content, encoding, message in (
        (b"a" * (PIECE - 2) + b"\xe6\xbc" + b"b", "utf-8", f"byte {PIECE - 2:,} is not utf-8"),
        (b"ab\xe6\xbc", "utf-8", r"byte 2 is not utf-8 \(unexpected end of data\)"),
        *(
            (b"a" * place + b"\0\xff", "utf-8", rf"a\.txt: byte {place:,} is NUL, so this is not text")
            for place in (0, PIECE - 1, PIECE + 3)
        ),
        ("ab\0".encode("utf-16"), "utf-16", "character 2 is NUL"),
        # A byte order mark does not shift the place.
        (codecs.BOM_UTF8 + b"ab\xff", "utf-8-sig", "byte 5 is not utf-8-sig"),
        *((b"a", encoding, "is not a text encoding") for encoding in ("utf-9", "hex", "", "a\0b")),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        with case((encoding, message)), pytest.raises(UsageError, match=message):
            read(tmp_path, encoding=encoding)


def test_missing_sources_and_special_files_are_refused(tmp_path: Path) -> None:
    for spec, message in (
        (tmp_path / "none", "there is no such file or folder"),
        (f"{tmp_path}/*.txt", "matches no file"),
        (tmp_path, "holds no text files"),
    ):
        with case(spec), pytest.raises(NotACheckpointError, match=message):
            read(spec)
    os.mkfifo(tmp_path / "pipe.txt")
    for spec in (tmp_path, tmp_path / "pipe.txt", "/dev/null"):
        with case(spec), pytest.raises(UsageError, match="is not a regular file"):
            read(spec)
    with pytest.raises(UsageError, match="it contains a NUL"):
        read("a\0b")
