"""Documents of tables: parquet files and saved datasets, their columns, and errors with file and row."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from chatgot.data.corpus import PIECE, CorpusReader, open_source
from chatgot.data.prepare import prepare
from chatgot.data.tokenizers.base import END_OF_DOCUMENT
from tensorkeep.errors import MissingExtraError, StoreError, UsageError
from tensorkeep.storage.parallel import Meter
from tensorkeep.testing.cases import case

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"document {number} ünï\n" * (number % 7) for number in range(700)]


def read(spec: Path | str, field: str = "text") -> dict[str, str]:
    with open_source(spec, field=field) as source:
        reading = CorpusReader(source, Meter(source.nbytes, None))
        found = {document.name: "".join(document.texts) for document in reading.documents()}
        assert reading.nbytes == source.nbytes
        return found


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=300)
    return path


def saved_dataset(folder: Path, *parts: list[str]) -> Path:
    """Write what ``Dataset.save_to_disk`` writes: Arrow streams, and a description."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        table = pa.table({"id": list(range(len(texts))), "text": texts})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=1000)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_each_row_of_a_table_or_of_a_saved_dataset_is_a_document(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS, other=list(range(700)))
    assert read(path) == {f"a.parquet:{number + 1}": text for number, text in enumerate(TEXTS)}
    with open_source(path) as source:
        assert (source.kind, source.has_documents) == ("parquet", True)
    folder = saved_dataset(tmp_path / "saved", TEXTS[:500], TEXTS[500:])
    assert list(read(folder).values()) == TEXTS
    with open_source(folder) as source:
        assert (source.kind, len(source.files)) == ("dataset", 2)


def test_a_folder_may_hold_tables_of_every_type_of_text_beside_files(tmp_path: Path) -> None:
    texts = ["a", "b", "a"]
    for number, column in enumerate(
        (pa.array(texts, pa.string()), pa.array(texts, pa.large_string()), pa.array(texts).dictionary_encode())
    ):
        parquet(tmp_path / f"{number}.parquet", text=column)
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "c.ndjson").write_text('{"text": "four"}')
    assert list(read(tmp_path).values()) == [*texts * 3, "three", "four"]


def test_another_column_or_field_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", content=["in a table"])
    (tmp_path / "b.jsonl").write_text('{"content": "on a line", "text": 3}')
    assert list(read(tmp_path, "content").values()) == ["in a table", "on a line"]
    with pytest.raises(UsageError, match=r"a\.parquet: has no column 'text'; its columns are 'content'") as caught:
        read(tmp_path)
    assert "--field" in str(caught.value.remedy)
    with pytest.raises(UsageError, match=r"b\.jsonl: line 1 is not a document \(.*missing required field `body`"):
        read(tmp_path / "b.jsonl", "body")


def test_a_dataset_saved_by_the_library_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"id": list(range(700)), "text": TEXTS})
    whole.shuffle(seed=1).select(range(100)).save_to_disk(tmp_path / "one", num_shards=2)
    assert list(read(tmp_path / "one").values()) == whole.shuffle(seed=1)[:100]["text"]
    datasets.DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "two")
    with pytest.raises(UsageError, match="holds several datasets: test, train"):
        read(tmp_path / "two")


def test_rows_without_text_are_refused(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0")
    for text, message in (
        ([1, 2], r"the column 'text' holds int64, not text"),
        (["a", None], r"row 2 has no text \(null\)"),
        (["a", "b\0"], r"a character of row 2 is NUL"),
        ([["a"], ["b"]], r"the column 'text' holds list<element: string>, not text"),
        (pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")]), "row 2 is not utf-8"),
    ):
        with case(message), pytest.raises(UsageError, match=r"a\.parquet: " + message):
            read(parquet(tmp_path / "a.parquet", text=text))


def test_damaged_tables_and_datasets_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS)
    content = path.read_bytes()
    message = r"a\.parquet: is not a file of parquet, or is damaged \("
    for damaged in (content[:-40], content[:4] + b"\xff" * 56 + content[60:], b"PAR1"):
        path.write_bytes(damaged)
        with case(len(damaged)), pytest.raises(UsageError, match=message):
            read(path)
    folder = saved_dataset(tmp_path / "saved", TEXTS[:5])
    path = folder / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="is not a file of arrow, or is damaged"):
        read(folder)
    path.unlink()
    with pytest.raises(StoreError, match="cannot read the file: No such file"):
        read(folder)
    for state in ("{", '{"_data_files": []}', '{"_data_files": [{"filename": "../a.arrow"}]}'):
        (folder / "state.json").write_text(state)
        with case(state), pytest.raises(UsageError, match=r"state\.json: does not describe a saved dataset"):
            read(folder)


def test_progress_reaches_the_end_and_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS)
    calls: list[tuple[int, int]] = []
    prepare(path, tmp_path / "data", tokenizer="char", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (2 * path.stat().st_size,) * 2
    assert calls == sorted(calls)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as caught:
        read(path)
    assert "chatgot[tables]" in str(caught.value.remedy)


def test_tokens_are_those_of_the_same_documents_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [*TEXTS, "long " * PIECE]
    parquet(tmp_path / "a.parquet", body=texts, id=texts, weight=texts)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text, "id": 1, "weight": 1}) for text in texts))
    made = [
        prepare(tmp_path / f"a.{end}", tmp_path / end, tokenizer="byte", field="body", validation=0.5)
        for end in ("parquet", "jsonl")
    ]
    # The split is by the name of the document, which has that of the file.
    for each in made:
        content = b"".join((each.path / f"{split}.bin").read_bytes() for split in ("train", "validation"))
        assert len(content) == 2 * sum(len(text.encode()) + 1 for text in texts if text)
    assert made[0].description["source"]["characters"] == made[1].description["source"]["characters"]
    assert made[0].description["source"]["documents"] == 601
    assert END_OF_DOCUMENT not in "".join(texts)
    notes = capsys.readouterr().err
    assert "not used: 'id', 'weight'\n" in notes and "not used: 'id'\n" in notes
