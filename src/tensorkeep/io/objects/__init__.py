"""Checkpoints in object stores: requests, the commit, directories of objects, and uploads."""
