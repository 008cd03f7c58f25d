"""Saving and loading one checkpoint by many ranks together, on `torch.distributed`."""
