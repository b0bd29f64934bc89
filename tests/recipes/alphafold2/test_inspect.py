"""`bevatron inspect` of a store of chains: its tables say what was prepared and what was not."""

import json

import pytest

from bevatron import cli
from bevatron.recipes.alphafold2 import inspect
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def prepared(shared, folder, tmp_path_factory):
    """The folder with hits, an alignment of no chain and a structure of a very low resolution."""
    root = tmp_path_factory.mktemp("inspected")
    (root / "other.a3m").write_text(">q\nACDEFGHIKLMNPQRSTVWYACDEFGHIKLMNPQRSTVWY\n")
    files = [folder, root / "other.a3m", shared / "data/proteins/templates/template_hits.tsv.gz"]
    files += [shared / f"data/proteins/mmcif/{name}.cif.gz" for name in ("102m", "4hhb")]
    prepare_chains(files, root / "chains", workers=0, progress=False)
    return root / "chains"


@pytest.fixture(scope="module")
def tables(prepared):
    return {table.title: table for table in inspect.describe(open_chains(prepared))}


def test_totals_filters_and_searches_are_counted(prepared, tables):
    rows = dict(tables[str(prepared)].rows)
    assert (rows["files"], rows["files with chains"], rows["left out"]) == (7, 6, 1)
    assert (rows["chains"], rows["latest release"] > rows["earliest release"]) == (9, True)
    filters = {row[0]: row[1] for row in tables["Filters"].rows}
    assert filters["copies of an earlier sequence"] == 3
    assert filters["all others"] == 9
    searches = {row[0]: row[1:] for row in tables["Alignments and templates"].rows}
    assert searches["alignments"][:2] == (3, 3)
    assert searches["templates"] == (1, 5, 1, 1.0, 1)
    missing = tables["Sequences without alignment"].rows
    assert sorted(missing) == [("102m_A", 1, 154), ("4hhb_A", 2, 141), ("4hhb_B", 2, 146)]
    clusters = dict(zip(tables["Clusters"].headers, tables["Clusters"].rows[0], strict=True))
    assert clusters["sequences"] == 6


def test_what_was_left_out_is_counted_by_reason(tables):
    reasons = dict(tables["Left out, by reason"].rows)
    assert sum(reasons.values()) == len(tables["Left out"].rows) == 5
    assert any("neither that of a chain" in reason for reason in reasons)


def test_pictures_are_drawn_and_the_command_gives_json(prepared, tmp_path, capsys):
    assert cli.main(["inspect", str(prepared), "--out", str(tmp_path / "out"), "--json"]) == 0
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    expected = {"lengths", "resolved", "resolution", "depths", "templates", "clusters"}
    assert names == expected
    found = json.loads(capsys.readouterr().out)["tables"]
    assert "Filters" in found
    assert all(name for rows in found.values() for row in rows for name in row)
