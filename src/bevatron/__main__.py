"""``python -m bevatron``: the same as the command ``bevatron``."""

from bevatron.cli import main

if __name__ == "__main__":
    main()
