"""Ways to turn text into tokens and back: characters, bytes, and byte pairs trained here or published by others."""
