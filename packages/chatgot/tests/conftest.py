"""Fixtures of the tests of training."""

import json
import shutil
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chatgot.config.config import Config
from chatgot.data.prepare import prepare
from chatgot.loop import TrainingSummary
from tensorkeep import machine
from tiny_training import Trained, prepared, run


@pytest.fixture(scope="module", autouse=True)
def quick_start() -> Iterator[None]:
    """Let a run that begins not measure the peak FLOP/s, start no git, and read the versions of packages once."""
    with pytest.MonkeyPatch.context() as patches:
        for user in ("run.setup", "techniques.mixed_precision"):
            patches.setattr(f"chatgot.{user}.measured_peak", lambda device, dtype=None: 1e9)
        patches.setattr("chatgot.run.folder._git", lambda: None)
        patches.setattr(machine, "versions", cache(machine.versions))
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the text of `tiny_training`, once for all tests."""
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Trained:
    """Return a function that copies a run of a configuration, which is trained once for all tests."""
    done: dict[tuple[bytes, int | None], tuple[Path, TrainingSummary]] = {}

    def copied(config: Config, folder: Path, *, stop_at: int | None = None) -> TrainingSummary:
        key = (msgspec.json.encode(config.as_dict(), order="sorted"), stop_at)
        if key not in done:
            original = tmp_path_factory.mktemp("trained") / "run"
            done[key] = original, run(config, original, data, stop_at=stop_at)
        original, summary = done[key]
        shutil.copytree(original, folder)
        return summary

    return copied


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare short documents of several lengths, once for all tests."""
    folder = tmp_path_factory.mktemp("documents")
    texts = [f"the quick {number} fox " * (1 + number % 3) for number in range(90)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return prepare(folder / "texts.jsonl", folder / "prepared", validation=0.2).path


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """Import transformers without network access and without its warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        module = pytest.importorskip("transformers")
        module.utils.logging.set_verbosity_error()
        module.utils.logging.disable_progress_bar()
        yield module
