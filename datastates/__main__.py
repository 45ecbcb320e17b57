"""``python -m datastates``: the command line."""

import sys

from datastates.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
