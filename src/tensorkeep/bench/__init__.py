"""The bench: what each way of doing a thing costs on this machine, measured honestly."""
