"""The memory of training, predicted."""
