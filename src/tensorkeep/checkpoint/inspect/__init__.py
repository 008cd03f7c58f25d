"""Looking at checkpoints: info, verify, diff, convert."""
