"""Write the golden checkpoints of the current format version; only for a new version, never again for an old one.

Usage: python tests/golden/make.py native-2
"""

from __future__ import annotations

import sys
from pathlib import Path

from states import state

import holdfast

HERE = Path(__file__).parent

if __name__ == "__main__":
    for name, options in {
        "raw": {},
        "lossless": {"compression": "lossless"},
        "sharded": {"shard_bytes": 4000},
        "zstd": {"compression": "zstd"},
        "gzip": {"compression": "gzip"},
    }.items():
        print(holdfast.save(state(), HERE / sys.argv[1] / name, metadata={"note": "golden"}, **options))
