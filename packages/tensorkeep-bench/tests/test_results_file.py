"""Reading results files: what is refused, and with which message."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from report import documents
from report.documents import placed
from tensorkeep import errors
from tensorkeep.testing.cases import case
from tensorkeep_bench import results as module
from tensorkeep_bench.results import read_results, write_results


def test_results_file_must_be_a_regular_file_and_not_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / "absent" / "results.json"):
        with pytest.raises(errors.NotACheckpointError, match="the results file does not exist") as caught:
            read_results(path)
        assert caught.value.exit_code == 5 and caught.value.remedy
    os.mkfifo(tmp_path / "results.json")
    with pytest.raises(errors.UsageError, match="not a regular file"):
        read_results(tmp_path)
    (tmp_path / "results.json").unlink()
    documents.write(documents.document(), tmp_path)
    assert read_results(tmp_path) == read_results(str(tmp_path / "results.json"))
    assert read_results(tmp_path).baseline == "baseline"
    zipped = tmp_path / "results.json.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "results.json").read_bytes()))
    assert read_results(zipped) == read_results(tmp_path)
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    with pytest.raises(errors.UnsupportedError, match="larger than"):
        read_results(tmp_path)
    # A small file may expand to any size.
    zipped.write_bytes(gzip.compress(bytes(10**6)))
    monkeypatch.setattr(module, "MAX_BYTES", 10_000)
    with pytest.raises(errors.CorruptCheckpointError, match="expands to more than"):
        read_results(zipped)
    zipped.write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(errors.CorruptCheckpointError, match="not a valid results file"):
        read_results(zipped)


def test_what_is_written_has_the_schema_of_today(tmp_path: Path) -> None:
    # A run of an earlier version may be resumed; its new verdicts would be called corrupt by that version.
    documents.write(documents.document(), tmp_path)
    old = read_results(tmp_path)
    assert old.schema == 1
    write_results(old, tmp_path / "results.json")
    assert read_results(tmp_path) == msgspec.structs.replace(old, schema=2)


def test_other_files_are_refused(tmp_path: Path) -> None:
    corrupt = errors.CorruptCheckpointError
    for content, error, expected in (
        (b"", corrupt, "not a valid results file"),
        (b'{"kind": "tensorkeep-results", "sch', corrupt, "not a valid results file"),
        (b"\xff\xfe", corrupt, "not a valid results file"),
        (b"[" * 200_000, corrupt, "not a valid results file"),
        (b'{"kind": "tensorkeep-results", "x": ' + b"[" * 200_000, corrupt, "nested too deeply"),
        (b'{"kind": "tensorkeep-results", "x": 1' + b"0" * 5000 + b"}", corrupt, "out of range"),
        (b"{}", errors.UsageError, "not a results file of Tensorkeep"),
        (b'{"kind": "something", "schema": 1}', errors.UsageError, "not a results file of Tensorkeep"),
        (b'{"kind": "tensorkeep-results", "schema": 3}', errors.UnsupportedError, "has schema 3"),
        (b'{"kind": "tensorkeep-results"}', errors.UnsupportedError, "schema"),
        (b'{"kind": "tensorkeep-results", "schema": 1}', corrupt, "experiment"),
    ):
        (tmp_path / "results.json").write_bytes(content)
        with case(content[:50]), pytest.raises(error, match=expected) as caught:
            read_results(tmp_path)
        assert caught.value.path == str(tmp_path / "results.json") and caught.value.remedy


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (placed("experiment", "baseline", value="absent"), "its baseline 'absent' is not an arm"),
        (placed("cells", 0, "arm", value="absent"), "belongs to 'absent'"),
        (placed("cells", 0, "status", value="fine"), "status"),
        (placed("cells", 0, "figures", value={"save": "fast"}), "figures"),
        (placed("cells", 0, "turns", value={"save": [[0.0, 1.0]]}), "turns"),
        (placed("cells", 0, "turns", value={"save": [[1.0, 0.0]]}), "turns"),
        (placed("cells", 0, "turns", value={"save": [[1e300, 1.0]]}), "turns"),
        (placed("cells", 0, "block", value=-1), "block"),
        (placed("cells", 0, "block", value=0.5), "block"),
        (lambda document: document["cells"][0].pop("block"), "missing required field `block`"),
        (placed("arms", 1, "name", value="baseline"), "same name"),
        (placed("arms", 1, "name", value=""), "length >= 1"),
        (placed("arms", 1, "name", value="x" * 201), "length <= 200"),
        (placed("arms", 1, "role", value="baseline"), "two arms have the role"),
        (placed("arms", 1, "role", value="spare"), "role"),
        (placed("arms", 1, "places", value=[{"kind": "point", "levels": 3}]), "levels"),
        (placed("arms", value=[]), "length >= 1"),
        (placed("arms", value=[{"name": str(number)} for number in range(2001)]), "length <= 2000"),
        (lambda document: document.pop("arms"), "missing required field `arms`"),
        (placed("measures", 1, "name", value="save"), "same name"),
        (placed("measures", 1, "label", value=""), "length >= 1"),
        (placed("measures", value=5), "measures"),
        (placed("experiment", "aliases", value=[[5]]), "aliases"),
        (placed("experiment", "factors", value={"a": 5}), "factors"),
        (placed("experiment", "factors", value={str(number): ["1"] for number in range(65)}), "length <= 64"),
        (placed("summary", "arms", "baseline", "save", value={"gain": "much"}), "gain"),
        (placed("summary", "arms", "baseline", "save", value={"verdict": "wins"}), "verdict"),
    ],
)
def test_broken_documents_are_refused(change: Callable[[dict[str, Any]], None], expected: str, tmp_path: Path) -> None:
    document = documents.document(control=False)
    change(document)
    with pytest.raises(errors.CorruptCheckpointError, match=expected):
        read_results(documents.write(document, tmp_path))


def test_deeply_nested_files_and_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    def nested(depth: int) -> dict[str, Any]:
        document = documents.document(runs=1)
        document["environment"]["note"] = 'brackets in a string \\" do not count: ' + "[" * 100
        for _ in range(depth):
            document["environment"] = {"deeper": document["environment"]}
        return document

    assert read_results(documents.write(nested(40), tmp_path)).environment is not None
    for depth in (60, 800):
        with pytest.raises(errors.CorruptCheckpointError, match="nested too deeply"):
            read_results(documents.write(nested(depth), tmp_path))
    text = json.dumps(documents.document())
    for number in ("1e999", "NaN", "-Infinity"):
        changed = text.replace('"seed": 0', f'"seed": 0, "limits": {{"a": {number}}}', 1)
        (tmp_path / "results.json").write_text(changed)
        with pytest.raises(errors.CorruptCheckpointError):
            read_results(tmp_path)
