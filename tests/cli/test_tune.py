"""``holdfast tune checkpoint``: what it measures, what it concludes, and what it leaves of a file that is there."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.bench import tune_checkpoint
from holdfast.bench.contest import Contest, Setting, default
from holdfast.bench.rounds import Rounds, Sample
from holdfast.bench.tune_checkpoint import Tuned, tune
from holdfast.bench.tuned_file import with_table, write_tuned
from holdfast.checkpoint import tuning
from holdfast.cli.main import build_app
from holdfast.errors import HoldfastError
from holdfast.testing.disk import FailingDisk, names_in

A, B, C = default(), Setting("lossless", default().threads, True), Setting("none", default().threads, False)


def contest(seconds: Mapping[Setting, list[float]]) -> Contest:
    """Return a contest in which each setting took so many seconds, round by round."""
    rounds = Rounds(0, order=[[] for _ in seconds[A]])
    for setting, row in seconds.items():
        rounds.samples += [Sample(index, setting.name, "save", value) for index, value in enumerate(row)]
        rounds.samples += [Sample(index, setting.name, "stored", 500.0) for index in range(len(row))]
    return Contest(list(seconds), rounds, 1000)


def run(*arguments: str | Path) -> int:
    command, bound, _ = build_app().parse_args(["tune", *map(str, arguments)], exit_on_error=False, print_error=False)
    return command(*bound.args, **bound.kwargs)


@pytest.mark.parametrize(
    ("first", "other", "verdict"),
    [
        ([1.0] * 5, [0.9] * 5, "faster"),
        ([1.0] * 4, [0.5] * 4, "too few rounds"),
        ([1.0] * 5, [0.97] * 5, "within noise"),
        ([1.0] * 5, [0.5, 0.5, 0.5, 0.5, 1.1], "within noise"),
        ([1.0] * 10, [0.5] * 9 + [1.1], "faster"),
        ([1.0] * 5, [1.2] * 5, "slower"),
        # A drift that meets both alike is no difference.
        ([1.0, 2.0, 3.0, 4.0, 5.0], [1.01, 1.98, 3.03, 3.96, 5.05], "within noise"),
    ],
)
def test_faster_means_beyond_the_noise(first: list[float], other: list[float], verdict: str) -> None:
    measured = contest({A: first, B: other})
    assert measured.verdict(B) == verdict
    assert measured.verdict(A) == "default"
    assert measured.winner() == (B if verdict == "faster" else A)


def test_of_several_the_fastest_wins() -> None:
    measured = contest({A: [1.0] * 5, B: [0.8] * 5, C: [0.5] * 5})
    assert measured.winner() == C
    tuned = Tuned("a state", 1000, (measured, contest({C: [1.0] * 5, A: [1.0] * 5})))
    assert tuned.choice == C
    assert tuned.sentence() == f"Save with {C.name}: 2.00x as fast as {A.name} (2.00 to 2.00)."


def test_the_default_is_kept_with_a_reason() -> None:
    noise = contest({A: [1.0] * 5, B: [0.99] * 5})
    assert "nothing else is faster beyond the noise" in Tuned("a state", 1000, (noise,)).sentence()
    short = contest({A: [1.0], B: [0.5]})
    assert "too few rounds" in Tuned("a state", 1000, (short,)).sentence()


def test_only_what_differs_from_the_default_is_written() -> None:
    assert A.table() == {"compression": "none"}
    many = Setting("lossless", 32, direct_io=False)
    assert many.table() == {
        "compression": "lossless",
        "threads": 32,
        "direct_io": False,
        "memory_budget": many.memory_budget,
    }
    # The budget lets all these threads work.
    text = with_table("", many.table(), [], Path("holdfast.toml"))
    assert tuning.parse(tomllib.loads(text), Path("holdfast.toml")).memory_budget == many.memory_budget


@pytest.mark.parametrize(
    "before",
    [
        "",
        "# mine, no end of line",
        "[convert]\nto = 'native' # mine\n",
        "[save]\n# mine\nthreads = 7\n#: theirs\ncompression = 'auto'\n\n[info]\nlargest = 3",
        "[info]\nlargest = 3\n\n  [ save ] # mine\n  direct_io = true # gone\n",
        "[save]\n\n[other]\n[[other.list]]\nx = 1\n",
        '[notes]\ntext = """\nthreads = 1\n"""\n',
    ],
)
def test_what_else_stands_in_the_file_stays(before: str, tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    values = {"compression": "lossless", "threads": 3}
    after = with_table(before, values, ["measured"], path)
    assert tomllib.loads(after) == {**tomllib.loads(before), "save": values}
    for line in before.splitlines():
        own = line.strip().startswith(("threads = 7", "compression", "direct_io", "#:"))
        assert (line in after.splitlines()) != own
    assert "#: measured\n" in after
    again = with_table(after, values, ["measured"], path)
    assert again == after


@pytest.mark.parametrize(
    "text",
    [
        "save = { threads = 3 }\n",
        "save.threads = 3\n",
        '["save"]\nthreads = 3\n',
        "[save]\ncompression = '''\nlossless'''\n",
        '[a]\nx = """\n[save]\nthreads = 1\n"""\n[save]\nthreads = 2\n',
    ],
)
def test_what_cannot_be_changed_without_loss_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text(text)
    with pytest.raises(holdfast.UsageError) as caught:
        write_tuned(path, {"compression": "none"}, [])
    assert caught.value.path == str(path)
    assert path.read_text() == text
    assert names_in(tmp_path) == ["holdfast.toml"]


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text("[info]\nlargest = 3\n")
    path.chmod(0o640)
    disk = FailingDisk(os.fsync)
    disk.fail_at(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk)
        with pytest.raises(holdfast.StoreError):
            write_tuned(path, {"compression": "none"}, [])
    assert path.read_text() == "[info]\nlargest = 3\n"
    assert names_in(tmp_path) == ["holdfast.toml"]
    write_tuned(path, {"compression": "none"}, [])
    assert tuning.read(path).compression == "none"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Setting, int]]:
    """Pretend that lossless takes half the time and the page cache twice; return what was saved."""
    saved: list[tuple[Setting, int]] = []

    def save(state: Any, path: Path, setting: Setting) -> Mapping[str, float]:
        saved.append((setting, sum(tensor.nbytes for tensor in state.values())))
        factor = (0.5 if setting.compression == "lossless" else 1.0) * (2.0 if not setting.direct_io else 1.0)
        return {"save": factor, "stored": 1000.0}

    monkeypatch.setattr(tune_checkpoint, "_save", save)
    monkeypatch.setattr(tune_checkpoint, "FEWEST_BYTES", 10**6)
    monkeypatch.setattr(tune_checkpoint, "MOST_ROUNDS", 6)
    monkeypatch.setattr("holdfast.cli.tune.FEWEST_BYTES", 10**6)
    return saved


def test_the_recommendation_is_written_and_followed(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("checkpoint", tmp_path, "--size", "1MB") == 0
    said = capsys.readouterr().out
    assert "Save with lossless" in said
    assert "2.00x" in said
    text = (tmp_path / "holdfast.toml").read_text()
    assert tuning.read(tmp_path / "holdfast.toml") == tuning.SaveTable(compression="lossless")
    assert "#: Save with lossless" in text
    assert all(line.startswith("#: ") for line in text.splitlines()[1:-1])
    report = holdfast.save({"w": torch.zeros(1000)}, tmp_path / "runs" / "step-1")
    assert (report.compression, report.settings_from) == ("lossless", str(tmp_path / "holdfast.toml"))
    assert names_in(tmp_path) == ["holdfast.toml", "runs"]


def test_json_holds_the_figures_and_a_dry_run_writes_nothing(
    tmp_path: Path, quick: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("checkpoint", tmp_path, "--size", "1MB", "--dry-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommendation"]["settings"] == {"compression": "lossless"}
    assert tomllib.loads(document["text"])["save"] == {"compression": "lossless"}
    assert not document["written"]
    assert [arm["verdict"] for arm in document["stages"][0]["arms"]] == ["default", "faster", "slower", "within noise"]
    assert len(document["stages"][0]["samples"]["samples"]) == 6 * 4 * 2
    assert names_in(tmp_path) == []


def test_a_checkpoint_of_ones_own(tmp_path: Path, quick: list[tuple[Setting, int]]) -> None:
    holdfast.save({"w": torch.zeros(1000)}, tmp_path / "own")
    assert run("checkpoint", tmp_path, "--from", tmp_path / "own", "--out", tmp_path / "x.toml", "--quiet") == 0
    assert {nbytes for _, nbytes in quick} == {4000}
    assert str(tmp_path / "own") in (tmp_path / "x.toml").read_text()


@pytest.mark.parametrize(
    ("prepare", "kind"),
    [
        (lambda folder: folder.rmdir(), "not-a-checkpoint"),
        (lambda folder: (folder / "holdfast.toml").write_text("[save]\nthread = 1"), "usage"),
        (lambda folder: (folder / "holdfast.toml").mkdir(), "usage"),
    ],
    ids=["no folder", "a wrong file", "no file"],
)
def test_what_cannot_end_well_is_told_before_the_measuring(
    tmp_path: Path, quick: list[Any], prepare: Callable[[Path], object], kind: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(HoldfastError) as caught:
        run("checkpoint", folder)
    assert caught.value.kind == kind
    assert quick == []


def test_it_really_saves(tmp_path: Path) -> None:
    holdfast.save({"w": torch.zeros(10**6)}, tmp_path / "own")
    before = names_in(tmp_path)
    names: list[str] = []
    tuned = tune(tmp_path, seconds=0.01, source=tmp_path / "own", on_visit=names.append)
    assert names_in(tmp_path) == before
    rows = [contest.row(setting) for contest in tuned.contests for setting in contest.settings]
    assert sorted(names) == sorted(row["name"] for row in rows)
    stored = {row["name"]: row["stored_bytes"] for row in rows}
    assert stored[B.name] < 100_000 < 4 * 10**6 < stored[A.name]
    assert all(row["rate_low"] <= row["rate"] <= row["rate_high"] for row in rows)
    with pytest.raises(holdfast.UsageError, match="no tensor"):
        holdfast.save({"n": 1}, tmp_path / "empty")
        tune(tmp_path, source=tmp_path / "empty")
