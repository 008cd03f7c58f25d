"""Safetensors files written and read in blocks, for the native and the safetensors format."""
