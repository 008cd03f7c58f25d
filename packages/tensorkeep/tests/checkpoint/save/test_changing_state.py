"""A state that other threads and processes change while it is saved: the checkpoint mixes values and is not damaged."""

import sys
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from changing_state import (
    assert_intact,
    changed_between_calls,
    changed_by_a_thread,
    check_beside_a_process,
    check_beside_a_thread,
    make_state,
)
from tiers import exhaustive

# Arguments of `save` by name. Every format, and everything that reads the state in a way of its own.
SAVES: dict[str, dict[str, Any]] = {
    "native": {},
    "native incremental": {"incremental": True},
    "native through the page cache": {"direct_io": False},
    **{f"native {name}": {"compression": name} for name in ("lossless", "raw", "planes", "zstd", "gzip")},
    "native lossless incremental": {"compression": "lossless", "incremental": True},
    **{name: {"format": name} for name in ("safetensors", "torch", "dcp")},
    "safetensors lossless": {"format": "safetensors", "compression": "lossless", "force": True},
    "safetensors shards": {"format": "safetensors", "shard_bytes": "1MiB"},
}


# The others read as one of these, or as a save in the test of incremental ones.
BETWEEN = ("native", "native incremental", "native lossless", "native zstd", "safetensors shards", "torch", "dcp")


@pytest.mark.parametrize("name", [*BETWEEN, *exhaustive(*(name for name in SAVES if name not in BETWEEN))])
def test_a_save_verifies_if_the_state_changes_between_any_two_calls(name: str, tmp_path: Path) -> None:
    state, memory = make_state()
    tensorkeep.save({}, tmp_path / "imports what it needs", **SAVES[name])
    with changed_between_calls(memory):
        tensorkeep.save(state, tmp_path / "c", **SAVES[name])
    assert_intact(tmp_path / "c", name)


# One of each format and compression, but those that a save in the background shows as well.
SOME = ["safetensors lossless"]
OTHERS = [name for name in SAVES if name not in SOME]
IN_THE_BACKGROUND = ["native", "native lossless", "safetensors", "torch", "dcp"]


@pytest.mark.parametrize(
    ("name", "background"),
    [*product(SOME, [False]), *product(IN_THE_BACKGROUND, [True]), *exhaustive(*product(OTHERS, [False]))],
)
def test_a_save_verifies_if_a_thread_writes_all_the_time(name: str, background: bool, tmp_path: Path) -> None:
    check_beside_a_thread(tmp_path, name, SAVES[name], background=background)


@pytest.mark.parametrize(
    ("changing", "options"),
    [
        (changed_between_calls, {}),
        (changed_between_calls, {"compression": "lossless", "delta": True}),
        (changed_by_a_thread, {"compression": "lossless"}),
        *exhaustive((changed_between_calls, {"compression": "lossless"}), (changed_by_a_thread, {})),
        *exhaustive((changed_by_a_thread, {"compression": "lossless", "delta": True})),
    ],
)
def test_an_incremental_save_of_a_changing_state_verifies(changing: Any, options: Any, tmp_path: Path) -> None:
    state, memory = make_state()
    tensorkeep.save(state, tmp_path / "base", incremental=True, **options)
    with changing(memory):
        tensorkeep.save(state, tmp_path / "c", base=tmp_path / "base", **options)
    assert_intact(tmp_path / "base")
    assert_intact(tmp_path / "c")


def test_containers_may_change_during_a_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"set": set(range(20)), "list": list(range(20)), "ordered": OrderedDict(a=1, b=2)}
    state |= {"dict": {f"key {number}": number for number in range(20)}, "numbers": dict.fromkeys(range(20), 0.5)}
    count = 0

    def change(*_: object) -> None:
        nonlocal count
        count += 1
        for name, key in (("dict", f"new {count % 7}"), ("numbers", -(count % 7)), ("ordered", f"new {count % 7}")):
            if state[name].pop(key, None) is None:
                state[name][key] = 1
        state["set"] ^= {count % 20}
        state["list"].insert(0, state["list"].pop())

    sys.setprofile(change)
    try:
        tensorkeep.save(state, tmp_path / "c")
    finally:
        sys.setprofile(None)
    assert count > 100
    loaded = tensorkeep.load(tmp_path / "c")
    assert {"key 0", "key 1"} <= loaded["dict"].keys()
    assert sorted(loaded["list"]) == list(range(20))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["native", *exhaustive("native lossless", "safetensors", "torch", "dcp")])
def test_a_save_verifies_if_another_process_writes_all_the_time(name: str, tmp_path: Path) -> None:
    check_beside_a_process(tmp_path, name, SAVES[name])
