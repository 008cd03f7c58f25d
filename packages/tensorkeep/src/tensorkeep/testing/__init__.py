"""Conformance suites for authors of formats, codecs, storages and techniques; no other module imports them."""
