"""The public functions: save, load, open, verify, diff, convert, info; on every format."""
