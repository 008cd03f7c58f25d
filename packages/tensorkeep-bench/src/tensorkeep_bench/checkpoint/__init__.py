"""The workload of checkpoints: save, load and verify a state with one of many tools."""
