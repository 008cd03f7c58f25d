"""Fixtures of the tests of commands of several packages."""

from quick_bench import quick_training  # noqa: F401
