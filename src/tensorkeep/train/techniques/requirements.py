"""What techniques may need of a machine: a CUDA device, a package, a compiler."""

import shutil
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Machine:
    """What this machine has; each question is answered when it is asked.

    Parameters
    ----------
    device : torch.device
        The device of the run.

    Examples
    --------
    >>> Machine(torch.device("cpu")).lacks_cuda()
    'needs a CUDA device; the run is on cpu'
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
        """Return what is missing if a CUDA device of a least compute capability is needed; None if it is there."""
        if not self.on_cuda:
            return f"needs a CUDA device; the run is on {self.device}"
        if self.capability < least:
            needed, found = (".".join(map(str, each)) for each in (least, self.capability))
            return f"needs compute capability {needed}; {torch.cuda.get_device_name(self.device)} has {found}"
        return None

    def lacks_package(self, module: str, *, install: str) -> str | None:
        """Return how to install the package of a module; None if it is installed."""
        return None if find_spec(module) else f"needs the package {module!r}, which is missing: pip install {install}"

    def lacks_compiler(self) -> str | None:
        """Return what `torch.compile` misses: a C++ compiler on the CPU, Triton on CUDA; None if it is there."""
        if self.on_cuda:
            return self.lacks_package("triton", install="triton")
        compilers = ("g++", "clang++", "c++")
        if any(shutil.which(each) for each in compilers):
            return None
        return f"needs a C++ compiler ({', '.join(compilers)}), and none was found"
