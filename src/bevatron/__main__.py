"""``python -m bevatron``: the same as the command ``bevatron``."""

from bevatron.cli import run

if __name__ == "__main__":
    run()
