"""What this machine has that techniques need."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Machine:
    """A machine as techniques ask about it; nothing is looked up before it is asked for.

    Parameters
    ----------
    device : torch.device
        What the run is to use.
    """

    device: torch.device

    @property
    def on_cuda(self) -> bool:
        """Whether the run uses a CUDA device."""
        return self.device.type == "cuda"

    @cached_property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the CUDA device; (0, 0) without one."""
        return torch.cuda.get_device_capability(self.device) if self.on_cuda else (0, 0)

    def lacks_cuda(self, *, least: tuple[int, int] = (0, 0)) -> str | None:
        """Say what is missing where a CUDA device is needed, of some compute capability or a later one."""
        if not self.on_cuda:
            return f"needs a CUDA device; the run is on {self.device}"
        if self.capability < least:
            wanted, found = (".".join(map(str, each)) for each in (least, self.capability))
            return f"needs compute capability {wanted}; {torch.cuda.get_device_name(self.device)} has {found}"
        return None

    def lacks_package(self, module: str, *, install: str) -> str | None:
        """Say how to install a package, by the module that it brings, unless it is there."""
        return None if find_spec(module) else f"needs the package {module!r}, which is missing: pip install {install}"

    def lacks_compiler(self) -> str | None:
        """Say what `torch.compile` misses: on the CPU a C++ compiler, on CUDA Triton."""
        if self.on_cuda:
            return self.lacks_package("triton", install="triton")
        compilers = ("cl",) if sys.platform == "win32" else ("g++", "clang++", "c++")
        if any(shutil.which(each) for each in compilers):
            return None
        return f"needs a C++ compiler ({', '.join(compilers)}), and none is found"
