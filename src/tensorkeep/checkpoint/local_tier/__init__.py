"""The local tier of a run in an object store: steps are saved to a disk, and uploaded in the background."""
