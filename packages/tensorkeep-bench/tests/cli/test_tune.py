"""``tensorkeep tune checkpoint``: measurements, conclusions, and the file of settings with its other content."""

import errno
import math
import os
import random
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorkeep
from analysis.simulations import most
from command_line import Call, RunJson
from documents import rounds
from tensorkeep.checkpoint import options
from tensorkeep.testing.cases import case
from tensorkeep.testing.format_suite import FailingDisk, names_in
from tensorkeep_bench.results import CellRecord
from tensorkeep_bench.run import runner
from tensorkeep_bench.tune import checkpoint as tune_checkpoint
from tensorkeep_bench.tune.checkpoint import (
    FEWEST_ROUNDS,
    Setting,
    TunedSave,
    TuningStage,
    check_writable,
    tune,
    with_table,
    write_tuned,
)
from tensorkeep_bench.workload import Outcome

DEFAULT = Setting.default()
A, B, C = DEFAULT, Setting("lossless", DEFAULT.threads, True), Setting("none", DEFAULT.threads, False)


def stage(seconds: Mapping[Setting, list[float]]) -> TuningStage:
    """Return a stage with the seconds of each setting, round by round."""
    cells = [
        CellRecord(setting.name, block, "ok", figures={"save": value, "stored": 500.0})
        for setting, row in seconds.items()
        for block, value in enumerate(row)
    ]
    return TuningStage(list(seconds), rounds(cells), 1000)


@pytest.mark.parametrize(
    ("first", "other", "verdict"),
    [
        ([1.0] * 6, [0.9] * 6, "faster"),
        ([1.0] * 5, [0.5, 0.51, 0.5, 0.52, 0.5], "faster"),
        ([1.0] * 4, [0.5] * 4, "too few rounds"),
        ([1.0] * 6, [0.97] * 6, "about the same"),
        ([1.0] * 6, [0.5, 0.5, 0.5, 0.5, 0.5, 3.0], "undecided"),
        ([1.0] * 10, [0.5] * 9 + [1.1], "faster"),
        ([1.0] * 10, [0.5] * 6 + [1.1, 1.2, 1.2, 1.9], "undecided"),
        ([1.0] * 6, [1.2] * 6, "slower"),
        # A drift that affects both settings equally is not a difference.
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.01, 1.98, 3.03, 3.96, 5.05, 5.94], "about the same"),
    ],
)
def test_verdict_needs_a_difference_beyond_the_noise(first: list[float], other: list[float], verdict: str) -> None:
    measured = stage({A: first, B: other})
    assert (measured.verdict(B), measured.verdict(A)) == (verdict, "default")
    assert measured.winner() == (B if verdict == "faster" else A)
    # The first setting is called the default only if it is.
    second = stage({B: [1.0] * 8, Setting("lossless", 1, True): [1.0] * 8})
    assert [second.row(setting)["verdict"] for setting in second.settings] == ["first", "about the same"]


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("others", [1, 3, 6])
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "with outliers"])
def test_equal_settings_are_rarely_called_faster(others: int, heavy: bool, count: int) -> None:
    """In stages of equal settings, 2.5% false gains are expected."""
    draw = random.Random(others)

    def seconds() -> float:
        outlier = 3.0 if heavy and draw.random() < 0.1 else 1.0
        return outlier * math.exp(draw.gauss(0.0, 0.15))

    settings = [A, *(Setting("lossless", threads, True) for threads in range(101, 101 + others))]
    stages = (stage({each: [seconds() for _ in range(6)] for each in settings}) for _ in range(count))
    assert sum(each.winner() != A for each in stages) <= most(count, 0.025, errors=3)


def test_fastest_of_several_wins_and_its_differences_are_written() -> None:
    measured = stage({A: [1.0] * 8, B: [0.8] * 8, C: [0.5] * 8})
    assert measured.winner() == C
    tuned = TunedSave("a state", 1000, (measured, stage({C: [1.0] * 8, A: [1.0] * 8})))
    assert tuned.choice == C
    assert tuned.sentence() == f"Save with {C.name}: 2.00x as fast as {A.name} (95% 2.00 to 2.00)."
    # The default is kept with a reason.
    noise = stage({A: [1.0] * 8, B: [0.99] * 8})
    assert "no other setting is shown to be faster" in TunedSave("a state", 1000, (noise,)).sentence()
    # Only differences from the default are written.
    assert A.table() == {"compression": "none"}
    many = Setting("lossless", 32, direct_io=False)
    changed = {"compression": "lossless", "threads": 32, "direct_io": False, "memory_budget": many.memory_budget}
    assert many.table() == changed
    # The memory budget is enough for all these threads.
    text = with_table("", many.table(), [], Path("tensorkeep.toml"))
    assert options.parse(tomllib.loads(text), Path("tensorkeep.toml")).memory_budget == many.memory_budget


def test_rest_of_the_file_is_kept(tmp_path: Path) -> None:
    for before in (
        "",
        "# mine, no end of line",
        "[convert]\nto = 'native' # mine\n",
        "[save]\n# mine\nthreads = 7\n#: theirs\ncompression = 'auto'\n\n[info]\nlargest = 3",
        "[info]\nlargest = 3\n\n  [ save ] # mine\n  direct_io = true # gone\n",
        "[save]\n\n[other]\n[[other.list]]\nx = 1\n",
        '[notes]\ntext = """\nthreads = 1\n"""\n',
    ):
        with case(before):
            path = tmp_path / "tensorkeep.toml"
            values = {"compression": "lossless", "threads": 3}
            after = with_table(before, values, ["measured"], path)
            assert tomllib.loads(after) == {**tomllib.loads(before), "save": values}
            for line in before.splitlines():
                own = line.strip().startswith(("threads = 7", "compression", "direct_io", "#:"))
                assert (line in after.splitlines()) != own
            assert "#: measured\n" in after
            again = with_table(after, values, ["measured"], path)
            assert again == after


def test_file_that_cannot_be_changed_without_loss_is_refused(tmp_path: Path) -> None:
    for text in (
        "save = { threads = 3 }\n",
        "save.threads = 3\n",
        '["save"]\nthreads = 3\n',
        "[save]\ncompression = '''\nlossless'''\n",
        '[a]\nx = """\n[save]\nthreads = 1\n"""\n[save]\nthreads = 2\n',
    ):
        with case(text):
            path = tmp_path / "tensorkeep.toml"
            path.write_text(text)
            with pytest.raises(tensorkeep.UsageError) as caught:
                write_tuned(path, {"compression": "none"}, [])
            assert (caught.value.path, path.read_text()) == (str(path), text)
            assert names_in(tmp_path) == ["tensorkeep.toml"]


def test_the_check_leaves_no_file_and_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tensorkeep.toml"
    check_writable(path)
    assert names_in(tmp_path) == []
    path.write_text("[info]\nlargest = 3\n")
    path.chmod(0o640)
    disk = FailingDisk(os.fsync)
    disk.fail_at(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk)
        with pytest.raises(tensorkeep.StoreError):
            write_tuned(path, {"compression": "none"}, [])
    assert (path.read_text(), names_in(tmp_path)) == ("[info]\nlargest = 3\n", ["tensorkeep.toml"])
    write_tuned(path, {"compression": "none"}, [])
    assert options.read_settings(path).compression == "none"
    assert path.stat().st_mode & 0o777 == 0o640


def test_link_to_another_file_system_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, path = tmp_path / "mounted", tmp_path / "tensorkeep.toml"
    mounted.mkdir()
    path.symlink_to("mounted/real.toml")
    honest = os.replace

    def replace(source: Path, target: Path) -> None:
        if (mounted in Path(source).parents) != (mounted in Path(target).parents):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        honest(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write_tuned(path, {"compression": "none"}, [])
    assert path.is_symlink()
    assert options.read_settings(mounted / "real.toml").compression == "none"
    assert (names_in(mounted), names_in(tmp_path)) == (["real.toml"], ["mounted", "tensorkeep.toml"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Setting, int]]:
    """Pretend that lossless takes half the time and the page cache twice; return what was saved."""
    saved: list[tuple[Setting, int]] = []

    def save(state: Any, path: Path, setting: Setting) -> Outcome:
        saved.append((setting, sum(tensor.nbytes for tensor in state.values())))
        factor = (0.5 if setting.compression == "lossless" else 1.0) * (2.0 if not setting.direct_io else 1.0)
        return Outcome(figures={"save": factor, "stored": 1000.0})

    monkeypatch.setattr(tune_checkpoint, "_save", save)
    monkeypatch.setattr(tune_checkpoint, "FEWEST_BYTES", 10**6)
    monkeypatch.setattr(tune_checkpoint, "MOST_ROUNDS", 9)
    return saved


def test_recommendation_is_written_and_followed(tmp_path: Path, quick: Any, call: Call) -> None:
    output = call("tune", "checkpoint", tmp_path, "--size", "1MB").out
    assert "Save with lossless" in output and "2.00x" in output
    path = tmp_path / "tensorkeep.toml"
    text = path.read_text()
    assert options.read_settings(path) == options.SaveTable(compression="lossless")
    assert "#: Save with lossless" in text
    assert all(line.startswith("#: ") for line in text.splitlines()[1:-1])
    report = tensorkeep.save({"w": torch.zeros(1000)}, tmp_path / "runs" / "step-1", settings=path)
    assert (report.compression, report.settings_from) == ("lossless", str(path))
    assert names_in(tmp_path) == ["runs", "tensorkeep.toml"]
    # A checkpoint of the user.
    quick.clear()
    call("tune", "checkpoint", tmp_path, "--from", tmp_path / "runs" / "step-1", "--out", tmp_path / "x.toml")
    assert {nbytes for _, nbytes in quick} == {4000}
    assert str(tmp_path / "runs" / "step-1") in (tmp_path / "x.toml").read_text()


def test_json_holds_the_figures_and_a_dry_run_writes_nothing(tmp_path: Path, quick: Any, run_json: RunJson) -> None:
    # It needs no place that can be written.
    out = tmp_path / "absent" / "x.toml"
    document = run_json("tune", "checkpoint", tmp_path, "--out", out, "--size", "1MB", "--dry-run")
    assert document["recommendation"]["settings"] == {"compression": "lossless"}
    assert tomllib.loads(document["text"])["save"] == {"compression": "lossless"}
    assert not document["written"]
    assert [arm["verdict"] for arm in document["stages"][0]["arms"]] == [
        "default",
        "faster",
        "slower",
        "about the same",
    ]
    assert len(document["stages"][0]["samples"]["cells"]) == 9 * 4
    assert names_in(tmp_path) == []


def read_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Refuse new files in a folder; permissions do not stop root."""
    honest = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and Path(path).parent == folder:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return honest(path, flags, *rest, **more)

    patch.setattr(os, "open", refuse)


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda folder, _: folder.rmdir(), 5),
        (lambda folder, _: (folder / "tensorkeep.toml").write_text("[save]\nthread = 1"), 2),
        (lambda folder, _: (folder / "tensorkeep.toml").mkdir(), 2),
        (lambda folder, _: (folder / "tensorkeep.toml").symlink_to("absent/tensorkeep.toml"), 2),
        (lambda folder, _: (folder.rmdir(), folder.touch()), 5),
        (read_only, 3),
    ],
    ids=["no folder", "invalid file", "folder instead of a file", "link to no folder", "file", "read-only"],
)
def test_unusable_place_is_refused_before_measuring(
    tmp_path: Path, quick: Any, monkeypatch: pytest.MonkeyPatch, call: Call, prepare: Callable[..., object], code: int
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    prepare(folder, monkeypatch)
    places = ([folder], [tmp_path, "--out", folder / "tensorkeep.toml"])
    for place, expected in zip(places, (code, 2 if code == 5 else code), strict=True):
        assert str(tmp_path) in call("tune", "checkpoint", *place, "--size", "1MB", code=expected).err
        assert quick == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only the test advances, which stands in for the module `time`."""
    clock = SimpleNamespace(now=1000.0, perf_counter=lambda: clock.now)
    for module in (tune_checkpoint, runner):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def slow(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Pretend that a load takes 1000 s, and a save 0.125 s."""

    def load(source: Path) -> dict[str, torch.Tensor]:
        clock.now += 1000.0
        return {"w": torch.zeros(1000)}

    def save(state: Any, path: Path, setting: Setting) -> Outcome:
        clock.now += 0.125
        return Outcome(figures={"save": 0.125, "stored": 1000.0})

    monkeypatch.setattr(tune_checkpoint, "load", load)
    monkeypatch.setattr(tune_checkpoint, "_save", save)
    return clock


def test_loading_is_untimed_and_too_short_a_time_names_a_sufficient_one(tmp_path: Path, slow: SimpleNamespace) -> None:
    begin = slow.now
    first, second = tune(tmp_path, seconds=10.0, source=tmp_path / "own").stages
    # Each stage gets half the time, and its first round is not recorded.
    assert (len(first.settings), first.rounds.blocks) == (4, 9)
    assert second.rounds.blocks == int(5.0 / (0.125 * len(second.settings))) - 1
    assert slow.now - begin <= 1010.0
    assert "no other setting is shown to be faster" in TunedSave("a state", 1, (first, second)).sentence()
    # Too short a time names a sufficient one.
    tuned = tune(tmp_path, seconds=2.0, source=tmp_path / "own")
    assert "too few rounds" in tuned.sentence()
    enough = int(tuned.sentence().split("--seconds ")[1].split()[0])
    again = tune(tmp_path, seconds=enough, source=tmp_path / "own")
    assert "no other setting is shown to be faster" in again.sentence()


def test_a_random_state_allows_enough_rounds(tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state: Any, path: Path, setting: Setting) -> Outcome:
        seconds = sum(tensor.nbytes for tensor in state.values()) / 6e6
        clock.now += seconds
        return Outcome(figures={"save": seconds, "stored": 1000.0})

    monkeypatch.setattr(tune_checkpoint, "_save", save)
    monkeypatch.setattr(tune_checkpoint, "FEWEST_BYTES", 10**6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    tuned = tune(tmp_path, seconds=100.0, nbytes=3 * 10**7)
    assert 10**6 < tuned.nbytes < 12 * 10**6
    assert all(stage.rounds.blocks >= FEWEST_ROUNDS for stage in tuned.stages)


def test_tuning_saves_checkpoints(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.zeros(10**6)}, tmp_path / "own")
    before = names_in(tmp_path)
    names: list[str] = []
    tuned = tune(tmp_path, seconds=0.01, source=tmp_path / "own", progress=lambda _, name: names.append(name))
    assert names_in(tmp_path) == before
    rows = [stage.row(setting) for stage in tuned.stages for setting in stage.settings]
    assert sorted(names) == sorted(row["name"] for row in rows)
    stored = {row["name"]: row["stored_bytes"] for row in rows}
    assert stored[B.name] < 100_000 < 4 * 10**6 < stored[A.name]
    assert all(row["rate_low"] <= row["rate"] <= row["rate_high"] for row in rows)
    with pytest.raises(tensorkeep.UsageError, match="no tensor"):
        tensorkeep.save({"n": 1}, tmp_path / "empty")
        tune(tmp_path, source=tmp_path / "empty")
