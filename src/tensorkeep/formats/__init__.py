"""Formats: how a checkpoint lies on disk. One format, one file; `base` is the contract."""
