"""What the other packages of Tensorkeep use besides its public names, by subject; they import nothing else from it.

A test holds them to it. Names here may change with any version: the packages have the same version and change together.
This module has what all of them use: paths, units, plug-ins, the machine.
"""

from tensorkeep import machine
from tensorkeep.closing import Closing
from tensorkeep.paths import StorePath, absolute, as_path, checked_path, endpoint
from tensorkeep.plugins import Registry
from tensorkeep.structs import prepared
from tensorkeep.units import counted, format_bytes, format_rate, format_seconds, number, parse_bytes

__all__ = [
    "Closing", "Registry", "StorePath", "absolute", "as_path", "checked_path", "counted", "endpoint", "format_bytes",
    "format_rate", "format_seconds", "machine", "number", "parse_bytes", "prepared"
]  # fmt: skip
