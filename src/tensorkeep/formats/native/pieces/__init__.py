"""Checkpoints that many ranks write together: boxes of tensors, one fragment of the manifest for each rank."""
