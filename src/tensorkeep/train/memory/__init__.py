"""The memory of training, predicted and measured."""
