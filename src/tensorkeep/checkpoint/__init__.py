"""What a person asks for: save, load, open, verify, diff, convert, info; on every format."""
