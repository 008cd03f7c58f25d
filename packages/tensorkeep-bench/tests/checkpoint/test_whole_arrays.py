"""Loading TensorStore arrays and T5X checkpoints array by array, as the bench measures it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import noise
from tensorkeep_bench.checkpoint import tools
from tensorkeep_bench.checkpoint.tools import load_t5x, load_tensorstore

pytest.importorskip("tensorstore")

LIMITS: list[dict[str, Any]] = [{}, {"in_flight": "one", "concurrency": 2}, {"in_flight": "all"}]


@pytest.mark.parametrize("options", [{}, {"zarr": 2, "dtype": "float32"}, {"kvstore": "ocdbt"}])
def test_tensorstore_checkpoint_is_loaded_with_views_and_dtypes(options: dict[str, Any], tmp_path: Path) -> None:
    base = torch.linspace(-2, 2, 24, dtype=torch.float16).reshape(6, 4)
    state = {"b": base, "t": base.t(), "f8": noise("float8_e5m2", 9), "c": noise("complex64", 3), "s": torch.tensor(3)}
    if options.get("dtype"):
        del state["f8"]
    tensorkeep.save(state, tmp_path / "c", format="tensorstore", **options)
    for limits in LIMITS:
        loaded = load_tensorstore(tmp_path / "c", **limits)
        assert difference({name: loaded[name] for name in state}, state) is None
        assert loaded["t"].untyped_storage().data_ptr() == loaded["b"].untyped_storage().data_ptr()


def test_t5x_checkpoint_is_loaded_with_inline_values(tmp_path: Path) -> None:
    state = {"a": noise("int32", 30, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(3.0)}
    state["tied"] = state["a"]
    tensorkeep.save(state, tmp_path / "c", format="t5x")
    for limits in LIMITS:
        loaded = load_t5x(tmp_path / "c", **limits)
        assert difference(state, {name: loaded[name] for name in state}) is None


def test_bytes_in_flight_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_MAX_IN_FLIGHT", 100)
    state = {f"t{number}": torch.full((20,), float(number)) for number in range(9)}
    tensorkeep.save(state, tmp_path / "c", format="tensorstore")
    loaded = load_tensorstore(tmp_path / "c")
    assert difference(state, {name: loaded[name] for name in state}) is None


def test_damaged_chunk_is_an_error(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.ones(20, 20)}, tmp_path / "c", format="tensorstore", chunk=100)
    chunk = tmp_path / "c" / "w" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    for limits in LIMITS:
        with pytest.raises(CorruptCheckpointError, match="Digest mismatch") as caught:
            load_tensorstore(tmp_path / "c", **limits)
        assert caught.value.name == "w"
