"""Running an experiment, one process per cell."""
