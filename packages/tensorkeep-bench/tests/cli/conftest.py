"""Fixtures of the tests of commands."""

from quick_bench import cells_in_process, quick_training, without_plots  # noqa: F401
