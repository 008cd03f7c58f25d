"""The bench: measures tools and techniques on this machine."""
