"""Pickles in checkpoints of torch, read without executing them: what they record, and its tensors and arrays."""
