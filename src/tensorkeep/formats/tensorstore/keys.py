"""The keys of arrays: safe names of directories that tell a tensor's name and never collide."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tensorkeep.formats.sealed import digest
from tensorkeep.formats.tensorstore.sidecar import RESERVED

_LONGEST = 200


def array_keys(names: Iterable[str]) -> dict[str, str]:
    """Return the key of each name: the name itself as far as it is plain, the rest percent-encoded.

    Unique on file systems that ignore case, too; at most 200 characters.
    """
    keys = {name: _plain(name) for name in names}
    counts = Counter(key.lower() for key in keys.values())
    return {
        name: key if counts[key.lower()] == 1 and len(key) <= _LONGEST else _marked(key, name)
        for name, key in keys.items()
    }


def _plain(name: str) -> str:
    kept = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)
    # Nothing hidden, no parent, and nothing that lies beside the arrays.
    if not kept or kept[0] == "." or kept.lower() in RESERVED:
        return f"%{ord(kept[0]):02X}{kept[1:]}" if kept else "%"
    return kept


def _marked(key: str, name: str) -> str:
    return f"{key[: _LONGEST - 17].rstrip('%')}-{digest(name.encode())}"
