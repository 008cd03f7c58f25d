"""``python -m tensorkeep`` runs the command line."""

import sys

from tensorkeep.cli.main import main

sys.exit(main())
