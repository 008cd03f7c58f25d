"""Techniques that were slower than the plain loop in our own measurements; the first line of each file has the cost."""
