"""``python -m datastates.cli``: the command line."""

import sys

from datastates.cli import main

if __name__ == "__main__":
    sys.exit(main())
