"""``python -m holdfast`` is the command line."""

import sys

from holdfast.cli.main import main

sys.exit(main())
