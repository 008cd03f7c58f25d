"""The hard links of an incremental save: to the opened files, under valid names, durable."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults.test_hostile_manifests import body_of, seal
from formats.native.steps import changed
from tensorkeep.formats.native import incremental
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in


def tensors(count: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(1000, generator=generator) for number in range(count)}


def test_the_base_is_the_current_directory_or_no_valid_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors()
    undecodable = os.fsdecode(os.fsencode(tmp_path) + b"/c.k-\xff")
    for place in ("a", undecodable):
        tensorkeep.save(state, tmp_path / place, incremental=True)
    monkeypatch.chdir(tmp_path / "a")
    for base, link in ((".", "from-a-model.tensorkeep"), (undecodable, "from-c_k-_-model.tensorkeep")):
        report = tensorkeep.save(changed(state, "w1"), tmp_path / "b", base=base, overwrite=True)
        assert report.base == base
        assert (tmp_path / "b" / link).exists()
        assert same(tensorkeep.load(tmp_path / "b"), changed(state, "w1"))


def test_base_names_that_differ_in_case_only(tmp_path: Path) -> None:
    state = tensors()
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    base = "0"
    for number, name in enumerate(("a", "A", "z")):
        state = changed(state, f"w{number}")
        tensorkeep.save(state, tmp_path / name, base=tmp_path / base)
        assert same(tensorkeep.load(tmp_path / name), state)
        base = name
    linked = [name for name in names_in(tmp_path / "z") if name.startswith("from-")]
    assert len({name.casefold() for name in linked}) == len(linked) == 3


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a checkpoint of `tensors`, saved as a base."""
    tensorkeep.save(tensors(), tmp_path / "a", incremental=True)
    return tmp_path / "a"


def save_without(base: Path, reason: str) -> None:
    """Save one changed tensor over a base, which must be refused with the reason; everything is then written."""
    path, state = base.parent / "b", changed(tensors(), "w0")
    report = tensorkeep.save(state, path, base=base, overwrite=True)
    assert report.base is None
    assert reason in (report.base_refused or "")
    assert names_in(path) == ["manifest.json", "model.safetensors"]
    assert same(tensorkeep.load(path), state)


@pytest.mark.parametrize("how", ["replaced", "cut short"])
def test_a_replaced_file_is_not_linked(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    tensorkeep.save(tensors(seed=1), tmp_path / "other", incremental=True)
    real = os.link

    def link(source: Any, target: Any, **kwargs: Any) -> None:
        if how == "replaced":
            os.replace(tmp_path / "other" / "model.safetensors", base / "model.safetensors")
        else:
            os.truncate(base / "model.safetensors", 5000)
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "link", link)
    save_without(base, "it was replaced or changed meanwhile")


def test_everything_is_written_where_links_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EXDEV, errno.EPERM, errno.EMLINK):

        def refuse(*args: object, number: int = number, **kwargs: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
        with case(errno.errorcode[number]):
            save_without(base, f"cannot be linked: {os.strerror(number)}")


def test_a_link_whose_name_would_be_too_long_is_refused(base: Path) -> None:
    body = body_of(base)
    body["files"][0]["name"] = "m" * 240 + ".safe"
    seal(body, base)
    (base / "model.safetensors").rename(base / body["files"][0]["name"])
    save_without(base, "its new name would be too long")


def test_a_linked_file_cut_short_fails_the_save(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = incremental.Links.finish

    def finish(self: incremental.Links, *arguments: Any) -> Any:
        os.truncate(base / "model.safetensors", 5000)
        return real(self, *arguments)

    monkeypatch.setattr(incremental.Links, "finish", finish)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="changed while it was linked"):
        tensorkeep.save(changed(tensors(), "w0"), tmp_path / "b", base=base)
    assert names_in(tmp_path) == ["a"]


def test_an_invalid_manifest_fails_the_save(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "_origin", lambda path: "")  # the rest of a linked file then counts as lost
    with pytest.raises(tensorkeep.UnsupportedError, match="as a load would refuse it") as caught:
        tensorkeep.save(changed(tensors(), "w0"), tmp_path / "b", base=base)
    assert (caught.value.path, names_in(tmp_path)) == (str(tmp_path / "b" / "manifest.json"), ["a"])


def test_too_many_files_of_earlier_saves_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "MOST_FILES", 2)
    state = tensors(8)
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    reports = []
    for number in range(1, 4):
        state = changed(state, f"w{number}")
        reports.append(tensorkeep.save(state, tmp_path / str(number), base=tmp_path / str(number - 1)))
    assert [report.base_refused for report in reports[:2]] == [None, None]
    assert "1 of its files would be too many" in (reports[2].base_refused or "")
    assert reports[2].base is not None
    assert same(tensorkeep.load(tmp_path / "3"), state)
    # A state of many parts may have as many files.
    state = {f"part{number}": tensors(1, seed=number) for number in range(5)}
    for number in range(4):
        base = {"base": tmp_path / f"parts-{number - 1}"} if number else {}
        report = tensorkeep.save(state, tmp_path / f"parts-{number}", incremental=True, **base)
        assert report.base_refused is None
    assert sum(name.startswith("from-") for name in names_in(tmp_path / "parts-3")) == 5


def test_a_missing_base_is_refused_unless_it_is_optional(tmp_path: Path) -> None:
    state = tensors(1)
    (tmp_path / "empty").mkdir()
    for place in ("step-000001", "empty"):
        with pytest.raises(tensorkeep.NotACheckpointError, match="cannot be the base of a save") as caught:
            tensorkeep.save(state, tmp_path / "b", base=tmp_path / place)
        assert caught.value.path == str(tmp_path / place)
    assert names_in(tmp_path) == ["empty"]
    # Everything is written if an optional base is gone.
    report = tensorkeep.save(state, tmp_path / "b", base=lambda: tmp_path / "gone")
    assert report.base is None
    assert "there is no such directory" in (report.base_refused or "")
    assert same(tensorkeep.load(tmp_path / "b"), state)


def test_a_base_with_few_used_blocks_is_reported(tmp_path: Path) -> None:
    state = tensors(4)
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    state = {"w0": state["w0"]}
    assert tensorkeep.save(state, tmp_path / "1", base=tmp_path / "0").base_refused is None
    report = tensorkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    assert report.base is None
    assert "less than 50% of each of its files is still in use" in (report.base_refused or "")
    for gone in ("0", "1"):
        shutil.rmtree(tmp_path / gone)
    assert same(tensorkeep.load(tmp_path / "2"), state)
