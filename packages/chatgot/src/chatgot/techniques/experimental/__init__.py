"""Techniques that were slower than the plain loop in our own measurements; the first line of a file states the cost."""
