"""How much memory a save and a load take besides the state, measured in a process of its own.

The state is one tensor of several times the memory budget, so that whatever is held of it beyond the budget shows.
``python benchmarks/peak_memory.py none contiguous 67108864 268435456 DIRECTORY`` prints one JSON object.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save
from tensorkeep.errors import TensorkeepError
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes
from tensorkeep_bench.checkpoint.files import release_memory

if TYPE_CHECKING:
    import torch

LAYOUTS = ("contiguous", "transposed")
COMPRESSIONS = ("none", "lossless")

INTERPRETER_ALLOWANCE = 32 * 1024**2
"""What threads' stacks, the contexts of zstd and numpy's temporaries may take beyond the budget of the buffers."""

_ROWS = 16_384
_REPEATS = 16
_SMALL_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most resident bytes of each call beyond those before it, and for a new tensor beyond that tensor."""

    compression: str
    layout: str
    budget: int
    state_bytes: int
    save: int
    load: int
    load_into: int

    @property
    def worst(self) -> int:
        """The largest of the three."""
        return max(self.save, self.load, self.load_into)


def measure_peak(compression: str, layout: str, budget: int, state_bytes: int, directory: Path) -> PeakMemory:
    """Measure in a fresh process; TensorkeepError if that process fails."""
    command = [sys.executable, __file__, compression, layout, str(budget), str(state_bytes), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TensorkeepError(f"the memory of {compression}, {layout} could not be measured: {done.stderr.strip()}")
    return PeakMemory(**json.loads(done.stdout))


def _measure(compression: str, layout: str, budget: int, state_bytes: int, directory: Path) -> PeakMemory:
    # Once small and untimed: imports, thread stacks and the codec's tables are there, whatever the state.
    small = _tensor(layout, _SMALL_COLUMNS)
    _cycle(small, compression, budget, directory / "small.ckpt")
    # bfloat16: two bytes an element
    tensor = _tensor(layout, state_bytes // (2 * _ROWS))
    saved, loaded, filled = _cycle(tensor, compression, budget, directory / "large.ckpt")
    return PeakMemory(compression, layout, budget, tensor.nbytes, saved, loaded - tensor.nbytes, filled)


def _cycle(tensor: "torch.Tensor", compression: str, budget: int, path: Path) -> tuple[int, int, int]:
    state = {"weight": tensor}
    saved = _extra(lambda: save(state, path, compression=compression, memory_budget=budget))
    loaded = _extra(lambda: load(path, memory_budget=budget))
    filled = _extra(lambda: load(path, into=state, memory_budget=budget))
    return saved, loaded, filled


def _extra(call: Callable[[], object]) -> int:
    release_memory()
    before = resident_bytes()
    reset_peak_resident()
    call()
    return peak_resident_bytes() - before


def _tensor(layout: str, columns: int) -> "torch.Tensor":
    import torch

    # Drawing all of it would take most of the time; no 16 MiB block repeats data.
    drawn = torch.empty(_ROWS // _REPEATS, columns, dtype=torch.bfloat16).normal_(0.0, 0.02)
    tensor = drawn.repeat(_REPEATS, 1)
    return tensor.t() if layout == "transposed" else tensor


if __name__ == "__main__":
    _compression, _layout, _budget, _state_bytes, _directory = sys.argv[1:]
    _found = _measure(_compression, _layout, int(_budget), int(_state_bytes), Path(_directory))
    print(json.dumps(asdict(_found)))
