"""The command line, one module per command. Other packages import ``options``, ``output``, ``text`` and ``errors``."""
