"""Try an installed tensorkeep: lossless checkpoints, in an environment and a folder that know nothing of this checkout.

    python -P tests/smoke_wheel.py CODER CHECKPOINT [OTHER ...]

CODER, ``compiled`` or ``Python``, must be in use; CHECKPOINT is written, and OTHERs, which another installation wrote,
must be the same to the bit. An error is an exit code other than 0.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import tensorkeep

CHECKOUT = Path(__file__).resolve().parents[1]
# Several blocks of 16 MiB, full and partial frames, an element alone, and nothing.
SHAPES = {"blocks": (3000, 3001), "frames": (262_145,), "one": (1,), "none": (0,)}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def build_state() -> dict[str, torch.Tensor]:
    """Return weights of every float dtype, the same in each process."""
    torch.manual_seed(0)
    weights = {name: torch.randn(shape, dtype=torch.float64) * 0.02 for name, shape in SHAPES.items()}
    state = {f"{dtype}.{name}": weights[name].to(dtype) for dtype in FLOATS for name in SHAPES}
    return state | {"counter": torch.arange(100_000), "mask": torch.arange(1000) % 3 == 0}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (each.flatten().view(torch.uint8) for each in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


def check_installation(coder: str) -> str:
    """Return the coder in use; it must be the expected one, and the package not that of the checkout."""
    assert not Path(tensorkeep.__file__).resolve().is_relative_to(CHECKOUT / "packages"), tensorkeep.__file__
    environment = [sys.executable, "-P", "-m", "tensorkeep", "env", "--json"]
    found: str = json.loads(subprocess.run(environment, check=True, capture_output=True, text=True).stdout)["coder"]
    assert found.startswith(f"{coder} ("), f"the coder in use is {found}, not {coder}"
    return found


def main(coder: str, path: str, *others: str) -> None:
    found, state = check_installation(coder), build_state()
    tensorkeep.save(state, path, compression="lossless")
    for checkpoint in (path, *others):
        assert tensorkeep.verify(checkpoint), f"{checkpoint} is damaged"
        loaded = tensorkeep.load(checkpoint)
        different = [name for name in state if not same(state[name], loaded[name])]
        assert loaded.keys() == state.keys() and not different, f"{checkpoint} differs: {different}"
    half = tensorkeep.info(path).by_dtype["bfloat16"]
    fraction = half.stored_bytes / half.nbytes
    assert fraction <= 0.67, f"bf16 takes {fraction:.3f} of its bytes"
    read = "".join(f", read {Path(other).name}" for other in others)
    where = f"{sysconfig.get_platform()}, Python {sys.version_info.major}.{sys.version_info.minor}, {found}"
    print(f"{where}: wrote {Path(path).name}, bf16 in {fraction:.3f} of its bytes{read}")


if __name__ == "__main__":
    main(*sys.argv[1:])
