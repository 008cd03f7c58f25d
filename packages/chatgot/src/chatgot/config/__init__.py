"""The configuration of a run: sections, recipes, and the sources of settings."""
