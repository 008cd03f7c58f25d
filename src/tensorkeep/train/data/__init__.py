"""Text becomes memory-mapped tokens, and tokens become batches that can be drawn again exactly."""
