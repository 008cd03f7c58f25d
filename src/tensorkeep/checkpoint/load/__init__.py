"""Loading: full states, tensors that exist already, lazy slices."""
