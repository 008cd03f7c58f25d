"""Codecs: bytes to bytes, always lossless. One codec, one file; `base` is the contract."""
