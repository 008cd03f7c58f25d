"""Safetensors files written and read in blocks: the engine of the native format and the safetensors format."""
