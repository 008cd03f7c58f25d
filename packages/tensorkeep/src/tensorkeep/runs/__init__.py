"""The steps of a training run: where they lie, which exist, and which are kept."""
