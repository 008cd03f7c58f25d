"""Saving a state: at once or in the background, with a chosen or measured compression."""
