"""`bevatron inspect` of a store of complexes: its tables say what was prepared."""

import pytest

from bevatron import cli
from bevatron.data.readers.proteins import read_structure
from bevatron.recipes.alphafold3 import inspect
from bevatron.recipes.alphafold3.stores import open_complexes, prepare_complexes
from bevatron.recipes.inspect import PlanOptions, inspect_store

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def tables(complexes):
    return {table.title: table for table in inspect.describe(open_complexes(complexes))}


def test_the_overview_counts_files_complexes_dates_and_resolutions(complexes, tables):
    rows = dict(tables[str(complexes)].rows)
    store = open_complexes(complexes)
    assert (rows["files"], rows["complexes"], rows["left out"]) == (4, 3, 1)
    assert rows["tokens"] == store.lengths("restype").sum()
    assert rows["earliest release"] == "1981-05-21"
    assert rows["earliest release"] < rows["latest release"]
    assert 1 < rows["resolution, median (Å)"] < 3
    assert rows["without a resolution"] == 0


def test_chains_are_counted_by_kind(tables):
    rows = {row[0]: row[1:] for row in tables["Chains"].rows}
    assert rows["RNA"] == (1, 1, 10, 10.0, 10)
    number, distinct, shortest, _, longest = rows["DNA"]
    assert (number, distinct, shortest, longest) == (5, 3, 8, 12)
    assert rows["protein"][:2] == (2, 1)


def test_what_was_left_out_is_named_with_its_reason(complexes, tables):
    ((file, reason),) = tables["Left out"].rows
    assert file.endswith("bad.cif")
    assert reason
    assert "Alignments and templates" not in tables


def test_pictures_are_drawn_and_plans_need_no_edges(complexes, tmp_path, capsys):
    shown, page = inspect_store(complexes, tmp_path / "out", PlanOptions(ranks=2))
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names == {"sizes_tokens", "lengths", "resolution", "kinds", "plan"}
    assert shown[-1].rows[-1][0] == "balanced"
    assert "tokens per batch" in shown[-1].title
    assert page.is_file()
    assert cli.main(["inspect", str(complexes), "--out", str(tmp_path / "again")]) == 0
    assert "Chains" in capsys.readouterr().out


def test_the_depths_of_alignments_are_shown(shared, components, tmp_path):
    structure = shared / "data/proteins/mmcif/1crn.cif.gz"
    sequence = read_structure(structure).sequence(0)
    alignment = tmp_path / "a.a3m"
    alignment.write_text(f">a\n{sequence}\n>b\n{sequence}\n>c\nA{sequence[1:]}\n")
    files = [structure, alignment]
    prepare_complexes(files, tmp_path / "s", components=components, workers=0, progress=False)
    store = open_complexes(tmp_path / "s")
    tables = {table.title: table for table in inspect.describe(store)}
    assert tables["Alignments and templates"].rows == [("alignments", 1, 0, 2, 2.0, 2)]
    assert "Sequences without alignment" not in tables
