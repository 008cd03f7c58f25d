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
from chatgot.cli.train import stop_on_signals
from chatgot.config.config import Config
from chatgot.data import dataset as dataset_module
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.loop import train
from chatgot.run import folder as folder_module
from chatgot.run.data import open_data
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.run.state import RunRandomState
from chatgot.step.device import chosen_device
from chatgot.step.state import StepState
from chatgot.step.world import World
from tensorkeep.checkpoint.stateful import RandomState
from tensorkeep.storage.base import SourceFile
from tensorkeep.testing.cases import case
from tiny_training import CONFIG as TINY
from tiny_training import TEXT, Witness

GIT = folder_module._git
CONFIG = TINY.changed({"loop.steps": 4, "loop.batch_size": 2, "checkpoint.every": 2, "loop.threads": None})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def data(tmp_path: Path, text: Path) -> Path:
    return prepare(text, tmp_path / "data").path


def run(config: Config, folder: Path, dataset: Dataset, *, resume: bool = False, steps: int | None = None) -> StepState:
    """Train, to the end or for some steps."""
    with open_run(config, RunFolder(folder), dataset, resume=resume) as opened:
        train(opened, Witness(), stop=lambda: opened.progress.step == steps)
        return opened


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_invalid_settings_are_refused_before_anything_is_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    path = tmp_path / "tensorkeep.toml"
    path.write_text('[save]\ncompression = "nonsense"\n')
    delta: dict[str, object] = {"checkpoint.incremental": "delta", "checkpoint.compression": "zstd"}
    refused: list[tuple[dict[str, object], str]] = [
        ({"checkpoint.compression": "nonsense"}, "there is no compression 'nonsense'"),
        ({"checkpoint.memory_budget": "nonsense"}, "'nonsense' is not a size"),
        ({"checkpoint.memory_budget": "1KiB"}, "too small for saving in the background"),
        (delta, 'incremental="delta" needs compression="lossless"'),
        ({"checkpoint.settings": str(path)}, r"tensorkeep\.toml: .*compression is 'nonsense'"),
        ({"loop.device": "meta"}, "the device 'meta' cannot be used"),
        ({"loop.device": "toaster"}, "the device 'toaster' cannot be used"),
        ({"sample.every": 1, "sample.prompt": "%"}, "'%'"),
        ({"log.tensorboard": True}, "needs TensorBoard"),
        ({"model.d_model": 2**42}, r"not enough memory for a model of .* parameters"),
        ({"model.d_model": 10**20}, r"not enough memory for a model of .* parameters"),
    ]
    errors = {"log.tensorboard": tensorkeep.MissingExtraError, "model.d_model": tensorkeep.OutOfMemoryError}
    for settings, message in refused:
        error = errors.get(next(iter(settings)), tensorkeep.UsageError)
        with case(settings), pytest.raises(error, match=message):
            run(CONFIG.changed(settings), tmp_path / "run", Dataset.open(data))
        assert not (tmp_path / "run").exists(), settings


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_record_describes_how_prepared_data_was_prepared(tmp_path: Path, text: Path, folder: RunFolder) -> None:
    dataset = Dataset.open(prepare(text, tmp_path / "data", tokenizer="byte", validation=0.25).path)
    run(CONFIG, folder.path, dataset)
    config = folder.record().config
    assert (config.data.tokenizer, config.data.vocab_size, config.data.validation) == ("byte", None, 0.25)
    assert config.data.source == str(tmp_path / "data")
    # The same call resumes it.
    assert run(CONFIG, folder.path, dataset, resume=True).progress.step == 4


def test_setting_that_contradicts_prepared_data_is_refused(data: Path, folder: RunFolder) -> None:
    config = CONFIG.changed({"data.source": str(data)})
    for resume in (False, True):
        if resume:
            run(config, folder.path, Dataset.open(data), steps=1)
        for name, value, message in (
            ("data.tokenizer", "byte", r"data\.tokenizer is 'byte', and the data was prepared with 'char'"),
            ("data.validation", 0.5, r"data\.validation is 0\.5, and the data was prepared with 0\.1"),
            ("data.vocab_size", 300, r"data\.vocab_size is 300, and the data was prepared with None"),
        ):
            with case((resume, name)):
                with pytest.raises(tensorkeep.UsageError, match=message):
                    open_data(config.changed({name: value}), folder, resume=resume, given=[name])
                # Settings of the recipe that the user did not give are not compared.
                assert open_data(config.changed({name: value}), folder, resume=resume).path == data


def test_vocabulary_size_is_an_upper_bound_and_kept(tmp_path: Path, text: Path, folder: RunFolder) -> None:
    config, given = CONFIG.changed({"data.source": str(text), "data.tokenizer": "bpe"}), ["data.vocab_size"]
    largest = config.changed({"data.vocab_size": 5000})
    dataset = open_data(largest, folder, given=given)
    assert dataset.vocab_size < 5000
    run(largest, folder.path, dataset, steps=2)
    assert folder.record().config.data == largest.data
    again = open_data(largest, folder, resume=True, given=["data.source", *given])
    assert run(largest, folder.path, again, resume=True).progress.step == 4
    on_prepared, other = config.changed({"data.source": str(dataset.path)}), RunFolder(tmp_path / "other")
    size = dataset.vocab_size
    for given_size in (size, 5000):
        found = open_data(on_prepared.changed({"data.vocab_size": given_size}), other, given=given)
        assert found.vocab_size == size
    with pytest.raises(tensorkeep.UsageError, match=rf"is {size - 1}, and .* with {size}"):
        open_data(on_prepared.changed({"data.vocab_size": size - 1}), other, given=given)


def test_data_is_found_from_any_folder_and_moved_data_at_the_given_place(
    tmp_path: Path, data: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(CONFIG, Path("run"), Dataset.open("data"), steps=2)
    monkeypatch.chdir(tmp_path / "run")
    here = RunFolder(".")
    assert open_data(here.record().config, here, resume=True).path == data
    config = folder.record().config
    moved = data.rename(tmp_path / "elsewhere")
    with pytest.raises(tensorkeep.NotACheckpointError, match=r"is no longer there\n.*--data FOLDER"):
        open_data(config, folder, resume=True)
    config = config.changed({"data.source": str(moved)})
    dataset = open_data(config, folder, resume=True, given=["data.source"])
    assert run(config, folder.path, dataset, resume=True).progress.step == 4
    assert about(folder.path)["resumed"][0]["settings"] == {"data.source": [str(data), str(moved)]}


def test_data_in_the_run_folder_moves_with_it_is_prepared_again_if_lost_and_must_be_identical(
    tmp_path: Path, text: Path, folder: RunFolder
) -> None:
    config = CONFIG.changed({"data.source": str(text)})
    run(config, folder.path, open_data(config, folder), steps=2)
    # Other text is refused while the run has its data.
    (tmp_path / "other.txt").write_text(TEXT)
    other = config.changed({"data.source": str(tmp_path / "other.txt")})
    with pytest.raises(tensorkeep.UsageError, match=r"other\.txt' is not prepared data"):
        open_data(other, folder, resume=True, given=["data.source"])
    moved = RunFolder(shutil.copytree(folder.path, tmp_path / "moved"))
    shutil.rmtree(folder.data)
    assert run(config, folder.path, open_data(config, folder, resume=True), resume=True).progress.step == 4
    shutil.rmtree(folder.data)
    text.write_text(TEXT.replace("fox", "xof"))
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        run(config, folder.path, open_data(config, folder, resume=True), resume=True)
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        open_data(config, folder, resume=True)
    text.unlink()
    shutil.rmtree(folder.path)
    dataset = open_data(moved.record().config, moved, resume=True)
    assert run(moved.record().config, moved.path, dataset, resume=True).progress.step == 4
    assert about(moved.path)["resumed"][0]["settings"] == {}


def test_different_data_is_reported_before_different_settings_and_damaged_data_skipped_for_an_intact_copy(
    tmp_path: Path, data: Path, text: Path, folder: RunFolder
) -> None:
    run(CONFIG, folder.path, Dataset.open(data), steps=1)
    other = Dataset.open(prepare(text, tmp_path / "other", tokenizer="byte").path)
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        run(CONFIG.changed({"optim.lr": 1.0}), folder.path, other, resume=True)
    config = CONFIG.changed({"data.source": str(other.path)})
    with pytest.raises(tensorkeep.UsageError, match="has changed since the run began"):
        open_data(config, folder, resume=True, given=["data.source"])
    shutil.copytree(data, folder.data)
    (folder.data / "train.bin").unlink()
    assert open_data(folder.record().config, folder, resume=True).path == data
    shutil.rmtree(data)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=r"train\.bin"):
        open_data(folder.record().config, folder, resume=True)


def test_new_settings_and_surroundings_are_noted(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.integration
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
    monkeypatch.setattr(folder_module, "_git", GIT)
    run(CONFIG, tmp_path / "run", Dataset.open(data), steps=1)
    assert about(tmp_path / "run")["git"]["changed"] is True


def test_a_signal_requests_a_stop_unless_it_was_ignored() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        with case(number), stop_on_signals() as stop:
            assert not stop()
            signal.raise_signal(number)
            if number == signal.SIGHUP:
                signal.raise_signal(number)
            assert stop()
        assert signal.getsignal(number) == before
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_resumed_run_does_not_read_unchanged_data_again_and_refuses_other_tokens(
    tmp_path: Path, data: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[str] = []
    verify = dataset_module._verify

    def recording(file: SourceFile, *others: Any) -> None:
        verified.append(file.path.name)
        verify(file, *others)

    monkeypatch.setattr(dataset_module, "_verify", recording)
    config = CONFIG.changed({"data.source": str(data)})
    run(config, folder.path, open_data(config, folder), steps=2)
    assert sorted(verified) == ["train.bin", "validation.bin"]
    verified.clear()
    resumed = run(config, folder.path, open_data(config, folder, resume=True), resume=True, steps=3)
    assert (resumed.progress.step, verified) == (3, [])
    # Another file with the same tokens is read once.
    path = data / "train.bin"
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    folder = RunFolder(folder.path)
    run(config, folder.path, open_data(config, folder, resume=True), resume=True)
    assert verified == ["train.bin"]
    verified.clear()
    open_data(config, RunFolder(folder.path), resume=True)
    assert verified == []
    # Other tokens are found, with the same size and file, and the old time of modification.
    before, content = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(b"\0\0\1\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match=r"train\.bin: its checksum is wrong"):
        open_data(config, RunFolder(folder.path), resume=True)
    path.write_bytes(content)
    verified.clear()
    # The record of an earlier version does not say which files were verified.
    record = about(folder.path)
    del record["data"]["verified"]
    (folder.path / "run.json").write_text(json.dumps(record))
    open_data(config, RunFolder(folder.path), resume=True)
    assert sorted(verified) == ["train.bin", "validation.bin"]
