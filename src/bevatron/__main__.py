"""``python -m bevatron``: the same as the command ``bevatron``."""

import sys

from bevatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
