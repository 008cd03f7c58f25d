"""The command line, one module per command.

Commands of other packages use ``options``, ``output``, ``text`` and ``errors``, and nothing else of this package.
"""
