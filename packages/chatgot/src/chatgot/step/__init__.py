"""One training step: what it reads and changes, its device and its ranks."""
