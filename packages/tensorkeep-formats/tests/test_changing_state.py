"""A state that others change while it is saved: the arrays mix values, and the checkpoint is not damaged.

TensorStore reads the state in threads of its own, which call no function of Python: nothing changes it between calls.
"""

from pathlib import Path
from typing import Any

import pytest

from changing_state import check_beside_a_process, check_beside_a_thread
from tiers import exhaustive

SAVES: dict[str, dict[str, Any]] = {
    "tensorstore": {"format": "tensorstore"},
    "tensorstore shards": {"format": "tensorstore", "chunk": "256KiB", "shard_bytes": "4MiB"},
    "tensorstore ocdbt": {"format": "tensorstore", "kvstore": "ocdbt"},
    "tensorstore float32": {"format": "tensorstore", "dtype": "float32"},
    "tensorstore one": {"format": "tensorstore", "in_flight": "one"},
    "tensorstore gzip": {"format": "tensorstore", "compressor": "gzip:1"},
    "tensorstore zstd": {"format": "tensorstore", "compressor": "zstd:1"},
    "tensorstore blosc": {"format": "tensorstore", "compressor": "blosc-lz4"},
    "tensorstore zarr 2": {"format": "tensorstore", "zarr": 2},
    "tensorstore zarr 2 gzip": {"format": "tensorstore", "zarr": 2, "compressor": "gzip:1"},
    "t5x": {"format": "t5x", "compressor": "gzip:1"},
    "t5x raw": {"format": "t5x", "compressor": None},
}
# One of each format and compression; the default is shown by a save in the background.
SOME = ["tensorstore ocdbt", "tensorstore zarr 2 gzip", "t5x"]
OTHERS = [(name, False) for name in SAVES if name not in SOME]


@pytest.mark.parametrize(
    ("name", "background"), [*((name, False) for name in SOME), ("tensorstore", True), *exhaustive(*OTHERS)]
)
def test_a_save_verifies_if_a_thread_writes_all_the_time(name: str, background: bool, tmp_path: Path) -> None:
    check_beside_a_thread(tmp_path, name, SAVES[name], background=background)


@pytest.mark.integration
def test_a_save_verifies_if_another_process_writes_all_the_time(tmp_path: Path) -> None:
    check_beside_a_process(tmp_path, "tensorstore", SAVES["tensorstore"])
