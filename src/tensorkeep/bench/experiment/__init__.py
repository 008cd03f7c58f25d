"""Experiments: their designs, and the files that describe them."""
