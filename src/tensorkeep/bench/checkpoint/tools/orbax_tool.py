"""Orbax: ``PyTreeCheckpointer`` on numpy arrays, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tensorkeep.bench.checkpoint.tools.arrays import to_arrays, to_tensors
from tensorkeep.bench.checkpoint.tools.base import Tool


class OrbaxTool(Tool, frozen=True, tag="orbax"):
    """Orbax's synchronous checkpointer: OCDBT and its own compression, as it comes."""

    needs: ClassVar[str | None] = "orbax"

    def save(self, state: Any, path: Path) -> None:
        import orbax.checkpoint as ocp

        ocp.PyTreeCheckpointer().save(path.absolute(), to_arrays(state))

    def load(self, path: Path) -> Any:
        import orbax.checkpoint as ocp

        return to_tensors(ocp.PyTreeCheckpointer().restore(path.absolute()))
