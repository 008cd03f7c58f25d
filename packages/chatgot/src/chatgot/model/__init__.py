"""The model: a decoder-only transformer; its configuration chooses the parts."""
