"""The workloads of ``tensorkeep demo``."""
