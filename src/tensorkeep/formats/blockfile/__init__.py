"""Safetensors files as runs of blocks: the engine that the native format and the safetensors format share."""
