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
from tensorkeep.formats.native import links, previous
from tensorkeep.testing.disk import names_in
from tensorkeep.testing.equality import same


def tensors(count: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(1000, generator=generator) for number in range(count)}


def with_one_changed(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {**state, name: state[name] + 1}


def test_the_base_is_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tensors()
    tensorkeep.save(first, tmp_path / "a", incremental=True)
    second = with_one_changed(first, "w1")
    monkeypatch.chdir(tmp_path / "a")
    report = tensorkeep.save(second, tmp_path / "b", base=".")
    assert report.base == "."
    assert (tmp_path / "b" / "from-a-model.tensorkeep").exists()
    assert same(tensorkeep.load(tmp_path / "b"), second)


def test_base_names_that_differ_in_case_only(tmp_path: Path) -> None:
    state = tensors()
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    base = "0"
    for number, name in enumerate(("a", "A", "z")):
        state = with_one_changed(state, f"w{number}")
        tensorkeep.save(state, tmp_path / name, base=tmp_path / base)
        assert same(tensorkeep.load(tmp_path / name), state)
        base = name
    linked = [name for name in names_in(tmp_path / "z") if name.startswith("from-")]
    assert len({name.casefold() for name in linked}) == len(linked) == 3


def test_a_base_whose_name_is_not_valid_unicode(tmp_path: Path) -> None:
    state = tensors()
    base = os.fsdecode(os.fsencode(tmp_path) + b"/c.k-\xff")
    tensorkeep.save(state, base, incremental=True)
    report = tensorkeep.save(state, tmp_path / "b", base=base)
    assert report.base == base
    assert (tmp_path / "b" / "from-c_k-_-model.tensorkeep").exists()
    assert same(tensorkeep.load(tmp_path / "b"), state)


def test_a_link_whose_name_would_be_too_long_is_refused(tmp_path: Path) -> None:
    state = tensors()
    base = tmp_path / "a"
    tensorkeep.save(state, base, incremental=True)
    body = body_of(base)
    body["files"][0]["name"] = "m" * 240 + ".safe"
    seal(body, base)
    (base / "model.safetensors").rename(base / body["files"][0]["name"])
    report = tensorkeep.save(state, tmp_path / "b", base=base)
    assert "its new name would be too long" in (report.base_refused or "")
    assert same(tensorkeep.load(tmp_path / "b"), state)


@pytest.mark.parametrize("how", ["replaced", "cut short"])
def test_a_file_replaced_before_it_is_linked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state = tensors()
    for name, content in (("a", state), ("other", tensors(seed=1))):
        tensorkeep.save(content, tmp_path / name, incremental=True)
    opened = tmp_path / "a" / "model.safetensors"
    real = os.link

    def link(source: Any, target: Any, **kwargs: Any) -> None:
        if how == "replaced":
            os.replace(tmp_path / "other" / "model.safetensors", opened)
        else:
            os.truncate(opened, 5000)
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "link", link)
    state = with_one_changed(state, "w0")
    report = tensorkeep.save(state, tmp_path / "b", base=tmp_path / "a")
    assert report.base is None
    assert "it was replaced or changed meanwhile" in (report.base_refused or "")
    assert names_in(tmp_path / "b") == ["manifest.json", "model.safetensors"]
    assert same(tensorkeep.load(tmp_path / "b"), state)


def test_a_linked_file_that_is_truncated_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors()
    tensorkeep.save(state, tmp_path / "a", incremental=True)
    real = links.Links.finish

    def finish(self: links.Links, *arguments: Any) -> Any:
        os.truncate(tmp_path / "a" / "model.safetensors", 5000)
        return real(self, *arguments)

    monkeypatch.setattr(links.Links, "finish", finish)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="changed while it was linked"):
        tensorkeep.save(with_one_changed(state, "w0"), tmp_path / "b", base=tmp_path / "a")
    assert names_in(tmp_path) == ["a"]


def test_an_invalid_manifest_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors()
    tensorkeep.save(state, tmp_path / "a", incremental=True)
    monkeypatch.setattr(links, "_origin", lambda path: "")  # the rest of a linked file then counts as lost
    with pytest.raises(tensorkeep.CorruptCheckpointError) as caught:
        tensorkeep.save(with_one_changed(state, "w0"), tmp_path / "b", base=tmp_path / "a")
    assert caught.value.path == str(tmp_path / "b" / "manifest.json")
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK], ids=errno.errorcode.get)
def test_everything_is_written_where_links_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    state = tensors()
    tensorkeep.save(state, tmp_path / "a", incremental=True)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    report = tensorkeep.save(state, tmp_path / "b", base=tmp_path / "a")
    assert report.base is None
    assert f"cannot be linked: {os.strerror(number)}" in (report.base_refused or "")
    assert names_in(tmp_path / "b") == ["manifest.json", "model.safetensors"]
    assert same(tensorkeep.load(tmp_path / "b"), state)


def test_too_many_files_of_earlier_saves_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previous, "MOST_FILES", 2)
    state = tensors(8)
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    reports = []
    for number in range(1, 4):
        state = with_one_changed(state, f"w{number}")
        reports.append(tensorkeep.save(state, tmp_path / str(number), base=tmp_path / str(number - 1)))
    assert [report.base_refused for report in reports[:2]] == [None, None]
    assert "1 of its files would be too many" in (reports[2].base_refused or "")
    assert reports[2].base is not None
    assert same(tensorkeep.load(tmp_path / "3"), state)


def test_a_state_of_many_parts_may_have_as_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previous, "MOST_FILES", 2)
    state = {f"part{number}": tensors(1, seed=number) for number in range(5)}
    tensorkeep.save(state, tmp_path / "0", incremental=True)
    for number in range(1, 4):
        report = tensorkeep.save(state, tmp_path / str(number), base=tmp_path / str(number - 1))
        assert report.base_refused is None
        assert sum(name.startswith("from-") for name in names_in(tmp_path / str(number))) == 5


def test_a_missing_base_is_refused(tmp_path: Path) -> None:
    state = tensors(1)
    (tmp_path / "empty").mkdir()
    for place in ("step-000001", "empty"):
        with pytest.raises(tensorkeep.NotACheckpointError, match="cannot be the base of a save") as caught:
            tensorkeep.save(state, tmp_path / "b", base=tmp_path / place)
        assert caught.value.path == str(tmp_path / place)
    assert names_in(tmp_path) == ["empty"]


def test_everything_is_written_if_an_optional_base_is_gone(tmp_path: Path) -> None:
    state = tensors(1)
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
