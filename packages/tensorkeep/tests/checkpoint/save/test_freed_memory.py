"""Memory that was freed, as FSDP does between its forward passes, is an error; a save keeps none when it is over."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.testing.cases import case


def freed() -> torch.Tensor:
    flat = torch.arange(2048.0)
    view = flat[1024:2048]
    flat.untyped_storage().resize_(0)
    return view


def test_a_save_and_a_load_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    refused = partial(pytest.raises, tensorkeep.UnsupportedLeafError, match="freed or made smaller")
    for format in ("native", "safetensors", "torch", "dcp"):
        for save in (tensorkeep.save, tensorkeep.save_async):
            with case((format, save.__name__)), refused():
                save({"a": torch.ones(3), "w": freed()}, tmp_path / "c", format=format)
    assert not any(tmp_path.iterdir())
    tensorkeep.save({"w": torch.ones(1024)}, tmp_path / "c")
    with refused():
        tensorkeep.load(tmp_path / "c", into={"w": freed()})


SAVES: dict[str, Callable[[Any, Path], object]] = {
    "save": tensorkeep.save,
    "background": lambda state, path: tensorkeep.save_async(state, path).wait(),
    "manager": lambda state, path: tensorkeep.CheckpointManager(path).save(1, state).wait(),
    "taken": lambda state, path: tensorkeep.save(state, path.parent),
    "failing": lambda state, path: tensorkeep.save(state, path, progress=lambda done, total: 1 // 0),
}


@pytest.mark.parametrize("save", SAVES)
def test_a_save_that_is_over_or_failed_does_not_keep_the_state(tmp_path: Path, save: str) -> None:
    state = {"w": torch.ones(1000)}
    kept = weakref.ref(state["w"])
    gc.disable()
    try:
        with suppress(ZeroDivisionError, tensorkeep.DestinationExistsError):
            SAVES[save](state, tmp_path / "c")
        del state
        assert kept() is None
    finally:
        gc.enable()
