"""A folder for the blocks of a page, and a bucket for those of object stores."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
