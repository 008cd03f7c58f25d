"""Formats of checkpoints on disk: one package for each; `base` is their contract."""
