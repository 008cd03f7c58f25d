"""Conformance suites for authors of formats, codecs, storages and techniques, and the checks that they use.

No other module of the package imports them.
"""
