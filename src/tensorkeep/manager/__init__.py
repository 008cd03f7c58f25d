"""The checkpoint manager: saves the steps of a run, in time, on a disk first if asked."""
