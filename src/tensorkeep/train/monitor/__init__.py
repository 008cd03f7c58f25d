"""What a run shows of itself beside its log: experiment trackers, gradient norms, profiles. None changes a loss."""
