"""The tools that the bench compares: each saves and loads a state in its own way."""
