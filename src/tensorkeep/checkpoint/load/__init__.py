"""Loading and reading: whole states, tensors that exist, lazy slices."""
