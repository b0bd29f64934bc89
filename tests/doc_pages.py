"""What a page of the docs shows: its fenced blocks, and the commands for a user to type."""

import functools
import re
from pathlib import Path

from bevatron import arguments

ROOT = Path(__file__).resolve().parents[1]


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page, language=""):
    """Fenced blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return [block for own, block in found if own == language]


def lines(page):
    """Lines of the blocks of no language, then every command of ours in running text."""
    shown = [line for block in blocks(page) for line in block.splitlines()]
    return [*shown, *re.findall(r"`(bevatron [^`]+)`", text_of(page))]


def only_parsed(monkeypatch):
    """Have commands and training only note what they would be called with, in the list returned."""
    called = []
    parse = arguments.call

    def call(function, *rest):
        @functools.wraps(function)
        def record(*args, **kwargs):
            called.append((function.__name__, args, kwargs))
            return 0

        return parse(record, *rest)

    monkeypatch.setattr(arguments, "call", call)
    monkeypatch.setattr("bevatron.recipes.training.start", lambda *a, **k: called.append(k) or 0)
    return called
