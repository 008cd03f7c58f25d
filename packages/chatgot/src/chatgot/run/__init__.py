"""A training run: its folder, its data, its state, its log."""
