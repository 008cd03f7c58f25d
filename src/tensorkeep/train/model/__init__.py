"""The model: a decoder-only transformer whose parts are chosen by a configuration."""
