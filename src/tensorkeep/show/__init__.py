"""What ``tensorkeep show`` finds out about a checkpoint, a run or two checkpoints, and its pages of HTML."""
