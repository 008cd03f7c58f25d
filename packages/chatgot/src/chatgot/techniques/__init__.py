"""Training techniques: each a switch in one file, proved to be on in every run that asks for it."""
