"""The pages of ``tensorkeep show``: a checkpoint, a run or the difference of two checkpoints as one file of HTML."""
