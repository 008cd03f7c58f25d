"""From samples to verdicts: statistics, effects, warnings, claims and recommendations."""
