"""Tables keep what tells their rows apart, results keep off what is not theirs."""

import json
import re

import numpy as np
import pytest

from bevatron.output import Result, is_quiet, note, print_table, quietly, say

NAMES = ["runs/2026-11-23/water-and-methanol/validation-part-0001.extxyz",
         "runs/2026-11-23/water-and-methanol/validation-part-0002.extxyz"]  # fmt: skip
HEADERS = ["file", "energy MAE\nmeV/atom", "energy RMSE\nmeV/atom", "forces MAE\nmeV/Å",
           "forces RMSE\nmeV/Å", "stress MAE\nmeV/Å^3", "stress RMSE\nmeV/Å^3"]  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_never_cuts_names_or_numbers(width, capsys):
    rows = [[name, *(f"{1234.5 + n:.1f}" for n in range(6))] for name in NAMES]
    print_table(HEADERS, rows, "by file", width)
    said = capsys.readouterr().out
    assert "…" not in said
    folded = re.sub(r"\d{4}\.\d|\s", "", said)
    for name in NAMES:
        assert name in folded
    for number in range(6):
        assert said.count(f"{1234.5 + number:.1f}") == 2
    if width >= 80:
        assert max(len(line.rstrip()) for line in said.splitlines()) <= width


def test_cells_in_brackets_are_text_and_no_markup(capsys):
    print_table(["", "[runs]/a"], [["data.train", "[water.extxyz]"], ["[b]:C:", "[/]"]], "[bold]")
    said = capsys.readouterr().out
    for text in ("[runs]/a", "[water.extxyz]", "[b]:C:", "[/]", "[bold]"):
        assert text in said


def test_a_quiet_command_keeps_its_notes(capsys):
    with quietly():
        say("a")
        note("b")
        print_table(["c"], [["d"]])
        with quietly(False):
            assert not is_quiet()
            say("e")
    note("f")
    assert capsys.readouterr() == ("e\n", "f\n")


def test_json_has_no_numbers_that_json_does_not_know(tmp_path):
    values = {"a": [1.5, float("inf")], "b": np.float64("nan"), "c": (tmp_path,), 3: None}
    text = Result(values, lambda: None).as_json()
    assert json.loads(text) == {"a": [1.5, None], "b": None, "c": [str(tmp_path)], "3": None}


def test_sentences_are_left_aligned_and_numbers_right(capsys):
    why = "its first sequence is neither that of a chain nor a part of one"
    print_table(["file", "frames", "reason"], [["a", "5", why], ["b", "12", "2 rows"]], width=80)
    lines = capsys.readouterr().out.splitlines()
    first, last = (next(line for line in lines if f" {name} " in line) for name in "ab")
    assert first.index("5") == last.index("12") + 1
    assert first.index("its") == last.index("2 rows")
