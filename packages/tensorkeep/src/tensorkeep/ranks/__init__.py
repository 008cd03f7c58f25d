"""One checkpoint saved and loaded by many ranks of `torch.distributed` together."""
