"""A folder for the blocks of a page, and the services that some pages use."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from documentation import services
from quick_bench import quick_training, without_plots  # noqa: F401
from store_servers import environment_of, make_bucket


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one and below a home folder of its own."""
    home, current = tmp_path / "home", tmp_path / "current"
    home.mkdir()
    current.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(current)
    return current


@pytest.fixture
def bucket(s3_url_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of S3 on this machine with the bucket of the documentation, which the environment names."""
    url = s3_url_of("ministack")
    make_bucket(url, "bucket")
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server on this machine like the hub of Hugging Face, which huggingface_hub uses."""
    from huggingface_hub import constants, hf_api

    with services.hub() as url:
        # Where huggingface_hub keeps what it reads from the environment when it is imported.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(hf_api.api, "endpoint", url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for wandb and mlflow."""
    for stand_in in (services.wandb, services.mlflow):
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in())  # type: ignore[arg-type]
