"""Formats: how checkpoints are laid out on disk. One package for each; `base` is the contract."""
