"""Stands in for ``safetensors``: the same names, on durable, atomic and parallel saves and loads.

``from safetensors.torch import save_file`` becomes ``from tensorkeep.safetensors.torch import save_file``, or shorter
``from tensorkeep.safetensors import save_file``: the functions for torch are here as well, as is `safe_open`. Errors
are those of Tensorkeep, and `SafetensorError` at the same time.
"""

from safetensors import SafetensorError

from tensorkeep.safetensors.opened import safe_open
from tensorkeep.safetensors.torch import load, load_file, load_model, save, save_file, save_model

__all__ = ["SafetensorError", "load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"]
