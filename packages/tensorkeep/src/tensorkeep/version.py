"""The version of all packages, as in their `pyproject.toml`."""

__version__ = "0.1.0"
