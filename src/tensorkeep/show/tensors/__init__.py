"""Statistics of tensors, read by blocks within a memory budget, sampled where they are large."""
