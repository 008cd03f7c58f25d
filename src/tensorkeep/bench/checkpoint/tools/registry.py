"""The tools by name, and the tool that an arm's settings describe."""

from collections.abc import Mapping

from tensorkeep.bench.checkpoint.tools.array_tools import OrbaxTool, T5xTool, TensorstoreTool
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.checkpoint.tools.tensorkeep_tool import TensorkeepTool
from tensorkeep.bench.checkpoint.tools.torch_tools import DcpTool, SafetensorsTool, TorchTool
from tensorkeep.bench.checkpoint.tools.zipnn_tool import ZipnnTool
from tensorkeep.errors import UsageError

_KINDS = (TorchTool, SafetensorsTool, DcpTool, TensorstoreTool, T5xTool, OrbaxTool, ZipnnTool, TensorkeepTool)
_TOOLS: dict[str, type[Tool]] = {str(kind.__struct_config__.tag): kind for kind in _KINDS}

COMMON_TOOLS: dict[str, Tool] = {
    "torch": TorchTool(),
    "safetensors": SafetensorsTool(),
    "tensorkeep": TensorkeepTool(),
    "tensorkeep-lossless": TensorkeepTool(compression="lossless"),
}
"""The usual choices, the baseline first."""


def parse_tool(settings: Mapping[str, object]) -> Tool:
    """Return the tool that an arm's settings describe.

    Raises UsageError if the tool is unknown, or a setting is unknown, of another type, or out of range.

    Examples
    --------
    >>> parse_tool({"tool": "dcp", "threads": 2})
    DcpTool(threads=2)
    """
    name = settings.get("tool")
    if not isinstance(name, str) or name not in _TOOLS:
        problem = f"the tool {name!r} does not exist" if "tool" in settings else "the setting 'tool' is missing"
        raise UsageError(problem, remedy=f"tools: {', '.join(_TOOLS)}")
    return _TOOLS[name].parse({key: value for key, value in settings.items() if key != "tool"})
