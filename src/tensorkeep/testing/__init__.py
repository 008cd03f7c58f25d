"""Conformance suites for authors of codecs, formats and techniques.

No other module of the package imports them.
"""
