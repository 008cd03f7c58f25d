"""Opening and resuming runs: early refusals, the data that is used, and the record."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint.stateful import RandomState
from tensorkeep.cli.train import stop_on_signals
from tensorkeep.io.source_file import SourceFile
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data import dataset as dataset_module
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.mixture import absolute_source
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import train
from tensorkeep.train.model.config import ModelConfig
from tensorkeep.train.run.data import open_data
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run, RunRandomState
from tensorkeep.train.run.world import World

TEXT = "the quick brown fox jumps over the lazy dog; " * 60
CONFIG = Config(
    recipe="tiny", model=ModelConfig(vocab_size=1, context_length=16, n_layers=1, n_heads=2, d_model=16)
).changed({"loop.steps": 4, "loop.batch_size": 2, "checkpoint.every": 2, "log.every": 1})


class Silence:
    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def data(tmp_path: Path, text: Path) -> Path:
    return prepare(text, tmp_path / "data").path


def run(config: Config, folder: Path, dataset: Dataset, *, resume: bool = False, steps: int | None = None) -> Run:
    """Train, to the end or for some steps."""
    with open_run(config, RunFolder(folder), dataset, resume=resume) as opened:
        train(opened, Silence(), stop=lambda: opened.progress.step == steps)
        return opened


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"checkpoint.compression": "nonsense"}, tensorkeep.UsageError, "there is no compression 'nonsense'"),
        ({"checkpoint.memory_budget": "nonsense"}, tensorkeep.UsageError, "'nonsense' is not a size"),
        ({"checkpoint.memory_budget": "1KiB"}, tensorkeep.UsageError, "too small for saving in the background"),
        (
            {"checkpoint.incremental": "delta", "checkpoint.compression": "zstd"},
            tensorkeep.UsageError,
            'incremental="delta" needs compression="lossless"',
        ),
        ({"loop.device": "meta"}, tensorkeep.UsageError, "the device 'meta' cannot be used"),
        ({"loop.device": "toaster"}, tensorkeep.UsageError, "the device 'toaster' cannot be used"),
        ({"sample.every": 1, "sample.prompt": "%"}, tensorkeep.UsageError, "'%'"),
        ({"model.d_model": 2**42}, tensorkeep.OutOfMemoryError, r"not enough memory for a model of .* parameters"),
        ({"model.d_model": 10**20}, tensorkeep.OutOfMemoryError, r"not enough memory for a model of .* parameters"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_written(
    tmp_path: Path, data: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(CONFIG.changed(settings), tmp_path / "run", Dataset.open(data))
    assert not (tmp_path / "run").exists()


def test_missing_tensorboard_is_refused_before_anything_is_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(tensorkeep.MissingExtraError, match="needs TensorBoard"):
        run(CONFIG.changed({"log.tensorboard": True}), tmp_path / "run", Dataset.open(data))
    assert not (tmp_path / "run").exists()


def test_invalid_settings_file_for_saves_is_refused_immediately(tmp_path: Path, data: Path) -> None:
    path = tmp_path / "tensorkeep.toml"
    path.write_text('[save]\ncompression = "nonsense"\n')
    with pytest.raises(tensorkeep.UsageError, match=r"tensorkeep\.toml: .*compression is 'nonsense'"):
        run(CONFIG.changed({"checkpoint.settings": str(path)}), tmp_path / "run", Dataset.open(data))
    assert not (tmp_path / "run").exists()


def test_record_describes_how_prepared_data_was_prepared(tmp_path: Path, text: Path) -> None:
    dataset = Dataset.open(prepare(text, tmp_path / "data", tokenizer="byte", validation=0.25).path)
    run(CONFIG, tmp_path / "run", dataset)
    config = RunFolder(tmp_path / "run").record().config
    assert (config.data.tokenizer, config.data.vocab_size, config.data.validation) == ("byte", None, 0.25)
    assert config.data.source == str(tmp_path / "data")
    # The same call resumes it.
    assert run(CONFIG, tmp_path / "run", dataset, resume=True).progress.step == 4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("data.tokenizer", "byte", r"data\.tokenizer is 'byte', and the data was prepared with 'char'"),
        ("data.validation", 0.5, r"data\.validation is 0\.5, and the data was prepared with 0\.1"),
        ("data.vocab_size", 300, r"data\.vocab_size is 300, and the data was prepared with None"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_setting_that_contradicts_prepared_data_is_refused(
    tmp_path: Path, data: Path, name: str, value: object, message: str, resume: bool
) -> None:
    config = CONFIG.changed({"data.source": str(data)})
    folder = RunFolder(tmp_path / "run")
    if resume:
        run(config, folder.path, Dataset.open(data))
    with pytest.raises(tensorkeep.UsageError, match=message):
        open_data(config.changed({name: value}), folder, resume=resume, given=[name])
    # Settings of the recipe that the user did not give are not compared.
    assert open_data(config.changed({name: value}), folder, resume=resume).path == data


def test_data_prepared_for_a_run_keeps_the_given_settings(tmp_path: Path, text: Path) -> None:
    config = CONFIG.changed({"data.source": str(text), "data.tokenizer": "bpe", "data.vocab_size": 5000})
    folder = RunFolder(tmp_path / "run")
    dataset = open_data(config, folder, given=["data.vocab_size"])
    assert dataset.vocab_size < 5000
    run(config, folder.path, dataset, steps=2)
    assert folder.record().config.data == config.data
    again = open_data(config, folder, resume=True, given=["data.source", "data.vocab_size"])
    assert run(config, folder.path, again, resume=True).progress.step == 4


def test_vocabulary_size_is_an_upper_bound(tmp_path: Path, text: Path) -> None:
    prepared = Dataset.open(prepare(text, tmp_path / "bpe", tokenizer="bpe", vocab_size=5000).path)
    config = CONFIG.changed({"data.source": str(prepared.path), "data.tokenizer": "bpe"})
    folder, given = RunFolder(tmp_path / "run"), ["data.vocab_size"]
    for size in (prepared.vocab_size, 5000):
        found = open_data(config.changed({"data.vocab_size": size}), folder, given=given)
        assert found.vocab_size == prepared.vocab_size
    with pytest.raises(
        tensorkeep.UsageError, match=rf"is {prepared.vocab_size - 1}, and .* with {prepared.vocab_size}"
    ):
        open_data(config.changed({"data.vocab_size": prepared.vocab_size - 1}), folder, given=given)


def move(data: Path, folder: Path) -> Path:
    shutil.move(data, folder)
    return folder


def test_moved_data_is_opened_at_the_given_place(tmp_path: Path, data: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(CONFIG, folder.path, Dataset.open(data), steps=2)
    config = folder.record().config
    moved = move(data, tmp_path / "elsewhere")
    with pytest.raises(tensorkeep.NotACheckpointError, match=r"is no longer there\n.*--data FOLDER"):
        open_data(config, folder, resume=True)
    config = config.changed({"data.source": str(moved)})
    dataset = open_data(config, folder, resume=True, given=["data.source"])
    assert run(config, folder.path, dataset, resume=True).progress.step == 4
    assert about(folder.path)["resumed"][0]["settings"] == {"data.source": [str(data), str(moved)]}


def test_data_in_the_run_folder_moves_with_it(tmp_path: Path, text: Path) -> None:
    config = CONFIG.changed({"data.source": str(text)})
    run(config, tmp_path / "run", open_data(config, RunFolder(tmp_path / "run")), steps=2)
    text.unlink()
    moved = RunFolder(move(tmp_path / "run", tmp_path / "moved"))
    dataset = open_data(moved.record().config, moved, resume=True)
    assert run(moved.record().config, moved.path, dataset, resume=True).progress.step == 4
    assert about(moved.path)["resumed"][0]["settings"] == {}


def test_data_of_a_run_opened_in_python_is_found_from_any_folder(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(CONFIG, Path("run"), Dataset.open("data"), steps=2)
    monkeypatch.chdir(tmp_path / "run")
    folder = RunFolder(".")
    assert open_data(folder.record().config, folder, resume=True).path == data


def test_lost_data_is_prepared_again_and_must_be_identical(tmp_path: Path, text: Path) -> None:
    config = CONFIG.changed({"data.source": str(text)})
    folder = RunFolder(tmp_path / "run")
    run(config, folder.path, open_data(config, folder), steps=2)
    shutil.rmtree(folder.data)
    assert run(config, folder.path, open_data(config, folder, resume=True), resume=True).progress.step == 4
    shutil.rmtree(folder.data)
    text.write_text(TEXT.replace("fox", "xof"))
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        run(config, folder.path, open_data(config, folder, resume=True), resume=True)
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        open_data(config, folder, resume=True)


def test_damaged_data_is_skipped_if_an_intact_copy_exists(tmp_path: Path, data: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(CONFIG, folder.path, Dataset.open(data), steps=2)
    shutil.copytree(data, folder.data)
    (folder.data / "train.bin").unlink()
    assert open_data(folder.record().config, folder, resume=True).path == data
    shutil.rmtree(data)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=r"train\.bin"):
        open_data(folder.record().config, folder, resume=True)


def test_other_text_is_refused_if_the_run_has_its_data(tmp_path: Path, text: Path) -> None:
    config = CONFIG.changed({"data.source": str(text)})
    folder = RunFolder(tmp_path / "run")
    run(config, folder.path, open_data(config, folder), steps=2)
    (tmp_path / "other.txt").write_text(TEXT)
    other = config.changed({"data.source": str(tmp_path / "other.txt")})
    with pytest.raises(tensorkeep.UsageError, match=r"other\.txt' is not prepared data"):
        open_data(other, folder, resume=True, given=["data.source"])


def test_different_data_is_reported_before_different_settings(tmp_path: Path, data: Path, text: Path) -> None:
    run(CONFIG, tmp_path / "run", Dataset.open(data), steps=2)
    other = Dataset.open(prepare(text, tmp_path / "other", tokenizer="byte").path)
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        run(CONFIG.changed({"optim.lr": 1.0}), tmp_path / "run", other, resume=True)
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        open_data(
            CONFIG.changed({"data.source": str(other.path)}),
            RunFolder(tmp_path / "run"),
            resume=True,
            given=["data.source"],
        )


def test_existing_paths_become_absolute_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "stdlib", "-"):
        Path(name).touch()
    found = [absolute_source(name) for name in ("text.txt", "nothing", "stdlib", "-")]
    assert found == [str(tmp_path / "text.txt"), "nothing", "stdlib", "-"]


def test_resuming_records_changed_settings_and_surroundings(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.open(data)
    run(CONFIG, tmp_path / "run", dataset, steps=1)
    assert about(tmp_path / "run")["resumed"] == []
    opened = run(CONFIG.changed({"checkpoint.every": 3}), tmp_path / "run", dataset, resume=True, steps=3)
    assert opened.notes == ()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    threads = torch.get_num_threads()
    try:
        opened = run(CONFIG.changed({"loop.threads": threads + 1}), tmp_path / "run", dataset, resume=True)
    finally:
        torch.set_num_threads(threads)
    first, second = about(tmp_path / "run")["resumed"]
    assert (first["step"], first["settings"], first["surroundings"]) == (1, {"checkpoint.every": [2, 3]}, {})
    assert (second["step"], second["settings"]) == (3, {"loop.threads": [None, threads + 1]})
    assert second["surroundings"] == {
        "torch": [about(tmp_path / "run")["surroundings"]["torch"], "9.9.9"],
        "threads": [threads, threads + 1],
    }
    assert len(opened.notes) == 1
    assert f"threads was {threads}, and is {threads + 1}" in opened.notes[0]
    assert about(tmp_path / "run")["surroundings"]["device"].startswith(("cpu (", "cuda ("))


def test_resuming_with_other_save_and_log_settings_ends_the_same(tmp_path: Path, data: Path) -> None:
    dataset = Dataset.open(data)
    run(CONFIG, tmp_path / "whole", dataset)
    run(CONFIG, tmp_path / "parts", dataset, steps=1)
    other = CONFIG.changed({"checkpoint.every": 1, "log.every": 2, "sample.every": 1, "checkpoint.incremental": False})
    run(other, tmp_path / "parts", dataset, resume=True)
    whole, parts = (
        tensorkeep.CheckpointManager(tmp_path / name / "checkpoints").restore(4) for name in ("whole", "parts")
    )
    for name in ("model", "average", "optimizers", "batches"):
        assert difference(whole[name], parts[name]) is None, name


def test_random_states_of_missing_gpus_are_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RandomState().state_dict() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 3}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(tensorkeep.UnsupportedError):
        RandomState().check_state_dict(state)
    RunRandomState(World()).check_state_dict(state)
    drawn = torch.rand(3)
    RunRandomState(World()).load_state_dict(state)
    assert torch.equal(torch.rand(3), drawn)


def test_chosen_device_and_unusable_devices() -> None:
    assert chosen_device("cpu") == torch.device("cpu")
    assert chosen_device("auto").type in ("cpu", "cuda")
    with pytest.raises(tensorkeep.UsageError, match=r'^the device \'cuda:99\' cannot be used: .*\ngive "auto"'):
        chosen_device("cuda:99")


def test_git_state_with_undecodable_file_names_is_recorded(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["config", "core.quotepath", "false"]):
        subprocess.run(["git", *command], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    Path(os.fsdecode(b"caf\xe9")).touch()
    run(CONFIG, tmp_path / "run", Dataset.open(data), steps=1)
    assert about(tmp_path / "run")["git"]["changed"] is True


def test_repeated_sighup_requests_a_stop() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with stop_on_signals() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop()
    assert signal.getsignal(signal.SIGHUP) == before


def test_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_request_a_stop(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(number)
        assert stop()


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files of tokens that are verified, as they are."""
    names: list[str] = []
    verify = dataset_module._verify

    def recording(file: SourceFile, *others: Any) -> None:
        names.append(file.path.name)
        verify(file, *others)

    monkeypatch.setattr(dataset_module, "_verify", recording)
    return names


def test_resumed_run_does_not_read_unchanged_data_again(tmp_path: Path, data: Path, read_files: list[str]) -> None:
    config, folder = CONFIG.changed({"data.source": str(data)}), RunFolder(tmp_path / "run")
    run(config, folder.path, open_data(config, folder), steps=2)
    assert sorted(read_files) == ["train.bin", "validation.bin"]
    read_files.clear()
    resumed = run(config, folder.path, open_data(config, folder, resume=True), resume=True, steps=3)
    assert (resumed.progress.step, read_files) == (3, [])
    # Another file with the same tokens is read once.
    shutil.copy(data / "train.bin", tmp_path / "copy")
    (tmp_path / "copy").rename(data / "train.bin")
    folder = RunFolder(folder.path)
    run(config, folder.path, open_data(config, folder, resume=True), resume=True)
    assert read_files == ["train.bin"]
    read_files.clear()
    open_data(config, RunFolder(folder.path), resume=True)
    assert read_files == []


def test_other_tokens_are_refused_whatever_the_time_of_the_file(tmp_path: Path, data: Path) -> None:
    """With the same size and file, and the old time of modification."""
    config, folder = CONFIG.changed({"data.source": str(data)}), RunFolder(tmp_path / "run")
    run(config, folder.path, open_data(config, folder), steps=2)
    path = data / "train.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"\0\0\1\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=r"train\.bin: its checksum is wrong"):
        open_data(config, RunFolder(folder.path), resume=True)


def test_record_of_an_earlier_version_reads_all_data(tmp_path: Path, data: Path, read_files: list[str]) -> None:
    config, folder = CONFIG.changed({"data.source": str(data)}), RunFolder(tmp_path / "run")
    run(config, folder.path, open_data(config, folder), steps=2)
    record = about(folder.path)
    del record["data"]["verified"]
    (folder.path / "run.json").write_text(json.dumps(record))
    read_files.clear()
    open_data(config, RunFolder(folder.path), resume=True)
    assert sorted(read_files) == ["train.bin", "validation.bin"]
