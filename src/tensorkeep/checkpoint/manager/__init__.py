"""The checkpoints of a training run: steps, retention, triggers."""
