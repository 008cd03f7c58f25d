"""Fixtures of the tests of training."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.train.data.prepare import prepare
from train.tiny_training import prepared


@pytest.fixture(scope="module", autouse=True)
def quick_peak() -> Iterator[None]:
    """Replace the measurement of the machine's peak FLOP/s, which takes longer than a test."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare the text of `tiny_training`, once for all tests."""
    return prepared(tmp_path_factory.mktemp("data"))


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
