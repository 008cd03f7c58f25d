"""The tools by name, and making one from an arm's settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.checkpoint.tools.dcp_tool import DcpTool
from tensorkeep.bench.checkpoint.tools.orbax_tool import OrbaxTool
from tensorkeep.bench.checkpoint.tools.safetensors_tool import SafetensorsTool
from tensorkeep.bench.checkpoint.tools.tensorkeep_tool import TensorkeepTool
from tensorkeep.bench.checkpoint.tools.tensorstore_tool import T5xTool, TensorstoreTool
from tensorkeep.bench.checkpoint.tools.torch_tool import TorchTool
from tensorkeep.bench.checkpoint.tools.zipnn_tool import ZipnnTool
from tensorkeep.errors import UsageError

_KINDS: dict[str, type[Tool]] = {
    "torch": TorchTool,
    "safetensors": SafetensorsTool,
    "dcp": DcpTool,
    "tensorstore": TensorstoreTool,
    "t5x": T5xTool,
    "orbax": OrbaxTool,
    "zipnn": ZipnnTool,
    "tensorkeep": TensorkeepTool,
}

USUAL: dict[str, Tool] = {
    "torch": TorchTool(),
    "safetensors": SafetensorsTool(),
    "tensorkeep": TensorkeepTool(),
    "tensorkeep-lossless": TensorkeepTool(compression="lossless"),
}
"""What most people choose between, the baseline first."""


def make(settings: Mapping[str, Any]) -> Tool:
    """Return the tool that an arm's settings describe: ``{"tool": "dcp", "threads": 2}``.

    Raises
    ------
    UsageError
        If there is no such tool, or a setting is unknown, of another type, or out of range.
    """
    name = settings.get("tool")
    if not isinstance(name, str) or name not in _KINDS:
        known = ", ".join(_KINDS)
        raise UsageError(f"there is no tool {name!r}" if "tool" in settings else "no 'tool' is given", remedy=known)
    kind = _KINDS[name]
    for key in settings:
        if key not in ("tool", *kind.__struct_fields__):
            near = difflib.get_close_matches(key, kind.__struct_fields__, n=1)
            known = ", ".join(kind.__struct_fields__) or "none"
            remedy = f"did you mean {near[0]!r}?" if near else f"its settings: {known}"
            raise UsageError(f"tool {name!r} has no setting {key!r}", remedy=remedy)
    try:
        tool = msgspec.convert(dict(settings), kind)
    except msgspec.ValidationError as error:
        raise UsageError(_sentence(name, str(error)), remedy="correct the setting") from error
    tool.check()
    return tool


def _sentence(tool: str, problem: str) -> str:
    found = re.fullmatch(r"(.*) - at `\$\.(\w+)`", problem, re.DOTALL)
    return f"tool {tool!r}: setting {found[2]!r}: {found[1]}" if found else f"tool {tool!r}: {problem}"
