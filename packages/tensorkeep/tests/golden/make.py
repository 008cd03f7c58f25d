"""Write golden checkpoints of the current format; only for a new version or feature, never again for an old one.

Usage: PYTHONPATH=tests python tests/golden/make.py native-1-suffix [changes | ranks]
"""

import sys
from pathlib import Path

from states import later, state

import tensorkeep
from simulated_ranks import at_random, save_by_ranks

HERE = Path(__file__).parent


def whole(place: Path) -> None:
    """Write a checkpoint in each way that a whole one is stored."""
    compressed = {name: {"compression": name} for name in ("lossless", "zstd", "gzip")}
    for name, options in {"raw": {}, "sharded": {"shard_bytes": 4000}, **compressed}.items():
        print(tensorkeep.save(state(), place / name, metadata={"note": "golden"}, **options))


def changes(place: Path) -> None:
    """Write steps that take from the step before what has not changed, raw and as differences."""
    for kind, options in {"raw": {}, "delta": {"compression": "lossless", "delta": True}}.items():
        first = place / f"{kind}-first"
        about = {"metadata": {"note": "golden"}, "incremental": True}
        print(tensorkeep.save(state(), first, compression=options.get("compression", "none"), **about))
        print(tensorkeep.save(later(), place / f"{kind}-later", base=first, **about, **options))


def ranks(place: Path) -> None:
    """Write checkpoints of three ranks: boxes of rows, boxes anywhere, and steps with differences."""
    about = {"metadata": {"note": "golden"}, "grid_bytes": 2048}
    save_by_ranks(place / "rows", state(), 3, **about, layouts={"model.layers.0.weight": "mesh (dp=3): S(0)"})
    save_by_ranks(place / "anywhere", state(), 3, at_random(3, seed=4), compression="lossless", **about)
    delta = {"compression": "lossless", "delta": True, "incremental": True}
    save_by_ranks(place / "delta-first", state(), 3, **about, **delta)
    save_by_ranks(place / "delta-later", later(), 2, **about, **delta, base=place / "delta-first")


if __name__ == "__main__":
    {"whole": whole, "changes": changes, "ranks": ranks}[(sys.argv[2:] or ["whole"])[0]](HERE / sys.argv[1])
