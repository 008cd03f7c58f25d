"""The tools that are compared: each saves a state its own way and gives it back. One tool, one file."""
