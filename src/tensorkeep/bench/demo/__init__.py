"""What `tensorkeep demo` shows."""
