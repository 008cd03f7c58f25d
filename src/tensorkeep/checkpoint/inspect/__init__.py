"""Looking at checkpoints: info, diff, convert."""
