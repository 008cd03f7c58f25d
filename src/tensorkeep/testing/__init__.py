"""Conformance suites for authors of codecs, formats and techniques; nothing else in the package imports them."""
