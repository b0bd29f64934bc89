"""The figures on README.md and benchmarks/README.md are those of the results, and short to read."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import figures

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "README.md"
TOY = """
- what: A step of {name}
  each: {name: [one, two]}
  overview: "{name}"
  result: mace/step
  value: ms
  where: {case: "{name}"}
  ours: {where: {who: ours}}
  peer: {where: {who: [a, b]}, named: who, names: {b: Peer B}}
  unit: ms
  better: lower
"""


@pytest.fixture
def toy(tmp_path):
    """Results of one area and what is declared about them; returns the page that is written."""
    rows = [
        {"case": case, "who": who, "ms": ms * times}
        for case, times in (("one", 1.0), ("two", 1000.0))
        for who, ms in (("ours", 2.0), ("a", 5.0), ("b", 3.0 / times))
    ]
    result = {"hardware": "nvidia-h200-x4", "date": "2026-01-02", "rows": rows}
    (tmp_path / "mace").mkdir()
    (tmp_path / "mace" / "step.json").write_text(json.dumps(result))
    (tmp_path / "declared").mkdir()
    (tmp_path / "declared" / "times.yaml").write_text(TOY)

    def page(section):
        text = f"<!-- figures: {section} -->\n<!-- end of figures -->\n"
        return figures.written(text, PAGE, figures.figures(tmp_path / "declared"), tmp_path)

    page.file = tmp_path / "mace" / "step.json"
    return page


def table_cells(page):
    """Every cell of the tables of a page, its links without their addresses."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())
    return [
        cell.strip()
        for line in text.splitlines()
        if line.startswith("|")
        for cell in line.strip("|").split("|")
    ]


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.parent.name)
def test_pages_have_the_figures_of_the_results(page):
    text = page.read_text()
    assert figures.written(text, page) == text, "run python -m benchmarks.figures"


def test_every_declared_figure_is_on_the_page():
    sections = set(re.findall(r"<!-- figures: (\w+) -->", PAGE.read_text()))
    assert sections == {"behind", *figures.figures()}
    assert "<!-- figures: overview -->" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.parent.name)
def test_no_cell_is_longer_than_25_words(page):
    found = table_cells(page)
    assert len(found) > 20
    assert not [cell for cell in found if len(cell.split()) > 25]


def test_the_readme_is_read_in_a_minute():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert ET.parse(ROOT / picture).getroot().tag.endswith("svg")


def test_every_newest_result_says_how_to_measure_it_again():
    _, again = PAGE.read_text().split("## Measure again")
    results = PAGE.parent / "results"
    pages = {str(p.relative_to(results)) for p in results.glob("*/*.md")}
    assert pages == set(re.findall(r"\(results/([\w/-]+\.md)\)", again))
    modules = re.findall(r"-m (benchmarks[\w.]+)", again)
    assert len(modules) > 40
    assert not [m for m in modules if not (ROOT / m.replace(".", "/")).with_suffix(".py").exists()]


def test_the_best_peer_is_named_and_ahead_where_it_is(toy):
    one, two = [line.split(" | ") for line in toy("times").splitlines()[3:5]]
    stamp = "2026-01-02, 4 x H200 |"
    assert one[1:] == ["2 ms", "3 ms, Peer B", "1.50", "[mace/step](results/mace/step.md)", stamp]
    assert one[0] == "| A step of one"
    assert two[1:4] == ["2,000 ms", "3 ms, Peer B", "**0.00, peer ahead**"]
    behind = toy("behind").splitlines()[3].split(" | ")
    assert behind == ["| times", "A step of two", *two[1:]]
    assert figures.SECTIONS.keys() == figures.figures().keys()
    short = toy("overview").splitlines()[3]
    assert short == "| [one](results/mace/step.md) | A step of one | 2 ms | 3 ms, Peer B | 1.50 |"


def test_another_number_in_a_result_is_another_page(toy):
    before = toy("times")
    toy.file.write_text(toy.file.read_text().replace("2.0", "2.5"))
    assert toy("times") == before.replace("| 2 ms", "| 2.50 ms").replace("1.50", "1.20")


def test_a_row_that_was_measured_on_another_day_or_elsewhere_says_so(toy):
    result = json.loads(toy.file.read_text())
    result["rows"][0] |= {"on": "cpu-2core", "date": "2026-01-01"}
    toy.file.write_text(json.dumps(result))
    assert "| 2026-01-01, 2 CPU cores; 2026-01-02, 4 x H200 |" in toy("times")


@pytest.mark.parametrize("where", [{"who": "nobody"}, {"who": ["a", "b"]}])
def test_a_value_that_is_not_there_or_not_one_is_refused(toy, where):
    value = figures.Measured("mace/step", "ms", {"case": "one", **where})
    results = {"mace/step": json.loads(toy.file.read_text())}
    with pytest.raises(LookupError, match=r"mace/step: \d rows"):
        value.read(results.__getitem__)
    assert replace(value, where={"case": "one", "who": "a"}).read(results.__getitem__)[0] == 5.0


def test_an_unknown_key_of_a_declared_figure_is_refused(toy):
    declared = toy.file.parents[1] / "declared"
    (declared / "times.yaml").write_text(TOY.replace("  unit:", "  units:"))
    with pytest.raises(LookupError, match="A step of one: unknown key units"):
        figures.figures(declared)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        *((1700.87, None, "1,701"), (12.81, None, "12.8"), (0.7698, None, "0.770")),
        *((6.0, None, "6"), (2868, 2, "2,900"), (4.5e-6, 1, "5e-06"), (0.0, None, "0")),
        (1.0003, 5, "1.0003"),
    ],
)
def test_numbers_are_printed_to_significant_digits(value, digits, text):
    assert figures.printed(value, digits) == text


def test_check_compares_and_writes_nothing(tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    page.write_text("<!-- figures: overview -->\nold\n<!-- end of figures -->\n")
    monkeypatch.setattr(figures, "PAGES", (page,))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    for arguments, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["figures.py", *arguments])
        before = page.read_text()
        with pytest.raises(SystemExit) as stop:
            figures.main()
        assert int(stop.value.code) == code
        assert (page.read_text() == before) == bool(arguments)


def test_results_name_no_folder_of_the_machine_that_measured():
    named = re.compile(r"(?<![\w./])/(?:tmp|home|root|work|mnt|scratch)/")
    results = [*(ROOT / "benchmarks" / "results").rglob("*.json"), *PAGE.parent.rglob("*.md")]
    assert results
    assert not [str(path) for path in results if named.search(path.read_text())]
