"""Paths that users give: URLs are refused where nothing can be written, ``~`` is expanded everywhere."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from chatgot.run.folder import RunFolder
from tensorkeep.cli.main import main
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.paths import checked_path
from tensorkeep.testing.cases import case

URL = "s3://bucket/run"
COMMANDS = (
    *("generate", "eval", "report", "data info", "show unused --out"),
    *("train shakespeare-char-cpu --out", "train shakespeare-char-cpu --out unused --data", "env --path", "env -C"),
    *("bench checkpoint --from", "bench checkpoint --dir", "bench claims --out", "export unused --out"),
    *("data prepare --out unused", "data prepare stdlib --out", "demo --dir", "tune checkpoint", "tune training --out"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_url_on_the_command_line_is_refused(command: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match="s3:// is not supported here"):
        RunFolder(URL)
    assert main([*command.split(), URL]) == 7
    assert f"error: {URL}: s3:// is not supported here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


UNSUPPORTED = ("gs://b/x", "az://b", "https://host/x.pt", "hf://a/b", "S3://b", "abfs+x.y-z://b", Path(URL))
# Secrets are not printed.
SECRETS = ("s3a://AKIA:SECRET@bucket/x", "https://host/x?sig=SECRET", "s3://AKIA:SECRET@bucket/x")
SCHEMES = {"file:///tmp/x": "without file://", **dict.fromkeys((*UNSUPPORTED, *SECRETS), "not supported")}


@pytest.mark.parametrize("url", SCHEMES)
def test_every_scheme_is_refused_where_files_are_written_and_other_names_are_paths(url: str | Path) -> None:
    with pytest.raises(UnsupportedError, match=SCHEMES[url]) as caught:
        checked_path(url)
    assert "SECRET" not in str(caught.value)
    for path in ("a:/b", "run/x://y", "a@b", "C:/x", "x:y", "s3:/bucket"):
        assert checked_path(path) == path


@pytest.mark.parametrize("url", ["hf://a/b", "abfs+x.y-z://b", "ftp://x/y"])
@pytest.mark.parametrize("read", [tensorkeep.load, tensorkeep.open, tensorkeep.verify, tensorkeep.info])
def test_unknown_schemes_are_refused_where_checkpoints_are_read(read: Callable[[str], Any], url: str) -> None:
    with pytest.raises(UnsupportedError, match="is not supported\ncheckpoints are read from disks and from s3://"):
        read(url)


@pytest.mark.parametrize("url", ["s3://", "gs:///", "https://"])
def test_a_url_without_a_bucket_is_not_a_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the URL has no bucket"):
        checked_path(url, stores=True)
    assert main(["convert", "x", "y", url]) == 2
    assert not list(tmp_path.iterdir())


def test_the_home_directory_is_expanded_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    report = tensorkeep.save({"step": 1}, "~/one")
    assert report.path == str(tmp_path / "one")
    tensorkeep.save({"step": 1}, Path("~/incremental"), base="~/one")
    with tensorkeep.CheckpointManager("~/run") as manager:
        manager.save(1, {"step": 1})
    assert tensorkeep.load("~/one") == tensorkeep.load("~/run") == {"step": 1}
    assert tensorkeep.convert("~/one", "~/two").path == str(tmp_path / "two")
    assert tensorkeep.diff("~/one", "~/two").equal
    assert tensorkeep.verify("~/one").ok
    assert RunFolder("~/chat").path == tmp_path / "chat"
    assert main(["env", "--path", "~"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["incremental", "one", "run", "two"]


def test_a_working_directory_that_is_gone_and_names_that_cannot_be_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    tensorkeep.save({"step": 1}, tmp_path / "a")
    for call in (
        partial(tensorkeep.save, {}),
        tensorkeep.CheckpointManager,
        partial(tensorkeep.convert, tmp_path / "a"),
    ):
        with pytest.raises(tensorkeep.StoreError, match="the working directory is not known"):
            call("b")
    for read in (tensorkeep.load, tensorkeep.verify, tensorkeep.CheckpointManager, partial(tensorkeep.save, {})):
        with pytest.raises(UsageError, match="has a character that names of files cannot have"):
            read("\ud800")


def test_an_unknown_user_is_an_error_and_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no user 'nobody-here'"):
        tensorkeep.save({}, "~nobody-here/run")
    (tmp_path / "~nobody-here").mkdir()
    assert tensorkeep.save({}, "~nobody-here/run").path == "~nobody-here/run"


def test_a_url_is_checked_before_it_is_used() -> None:
    calls: list[Callable[[str], Any]] = [
        tensorkeep.CheckpointManager,
        lambda url: tensorkeep.CheckpointManager("s3://bucket/run", local=url),
        tensorkeep.load,
        lambda url: tensorkeep.save({}, url),
    ]
    urls = dict.fromkeys(("https://u:SECRET@host/x", "s3://bucket/x?sig=SECRET"), "has a query, a fragment or a user")
    urls |= {"https://u:SECRET@host/x\0": "contains a NUL", "http://u:SECRET@host/\ud800": "names of files cannot have"}
    for url, message in {**urls, "s3://bucket/a/../b": "has '..' in it"}.items():
        for call in calls:
            with case(url), pytest.raises(UsageError, match=message) as caught:
                call(url)
            assert "SECRET" not in str(caught.value)
