"""Tokenizers: characters, bytes, and byte pairs, trained here or published by others."""
