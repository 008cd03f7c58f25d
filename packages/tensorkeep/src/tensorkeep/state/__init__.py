"""A nested state and its named leaves."""
