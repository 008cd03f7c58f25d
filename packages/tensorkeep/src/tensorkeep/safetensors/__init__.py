"""Drop-in for ``safetensors``: the same names, with durable, atomic and parallel saves and loads.

Replace ``from safetensors.torch import save_file`` by ``from tensorkeep.safetensors.torch import save_file``, or by
``from tensorkeep.safetensors import save_file``. Errors are errors of Tensorkeep, and also `SafetensorError`.
"""

from safetensors import SafetensorError

from tensorkeep.safetensors.file import safe_open
from tensorkeep.safetensors.torch import load, load_file, load_model, save, save_file, save_model

__all__ = ["SafetensorError", "load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"]
