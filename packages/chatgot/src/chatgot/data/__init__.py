"""Training data: text becomes memory-mapped tokens, and tokens become reproducible batches."""
