"""Checkpoint formats of other frameworks for Tensorkeep: arrays of TensorStore, and T5X."""
