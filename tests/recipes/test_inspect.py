"""`bevatron inspect`: the tables say what is in the files, and the figures are drawn."""

from functools import partial

import numpy as np
import pytest

from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import STRUCTURE_FIELDS, unlabelled_structure
from bevatron.data.store.prepare import prepare
from bevatron.data.summary import inspect
from bevatron.data.summary.structures import summarise_structures
from bevatron.errors import StoreError
from bevatron.recipes.inspect import PlanOptions, inspect_store, show_tables


class Chains:
    """Two files: chains of hydrogen with forces, and single oxygens with nothing."""

    sources = ("chains.xyz", "single.xyz")
    fingerprint = "chains"
    num_samples = 60

    def read(self, start, stop):
        for i in range(start, stop):
            file, size = (0, 2 + i % 9) if i < 50 else (1, 1)
            sample = unlabelled_structure(
                [1] * size if file == 0 else [8], np.arange(size)[:, None] * [1.0, 0, 0]
            )
            sample["source"] = np.array([file, i % 50])
            if file == 0:
                sample["energy"] = np.array(-2.0 * size)
                sample["forces"] = np.full((size, 3), 0.5)
                sample["group"] = np.frombuffer(b"chain", dtype=np.uint8)
            yield sample

    def describe(self, index):
        return f"frame {index}"

    def report(self):
        return []


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return prepare(
        Chains(),
        partial(add_neighbours, cutoff=1.5),
        tmp_path_factory.mktemp("inspect") / "store",
        STRUCTURE_FIELDS,
        {"cutoff": 1.5},
        workers=0,
        progress=False,
        summarise=summarise_structures,
    )


def test_figures_that_cannot_be_written_are_refused_before_they_are_drawn(store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/x: cannot be written, a file is where a folder"):
        inspect_store(store.path, tmp_path / "file/x")


@pytest.fixture(scope="module")
def tables(store):
    return {table.title: table for table in inspect.describe(store)}


def test_overview_counts_everything(store, tables):
    rows = dict(tables[str(store.path)].rows)
    chains = sum(2 + i % 9 for i in range(50))
    assert rows["structures"] == 60
    assert rows["atoms"] == chains + 10
    assert rows["edges"] == 2 * (chains - 50)
    assert rows["cutoff (Å)"] == 1.5


def test_every_column_has_a_name_for_programs(tables):
    assert all(header for table in tables.values() for header in table.headers)


def test_each_file_has_its_sizes_neighbours_and_label_coverage(tables):
    chains, single = tables["Files"].rows
    assert chains == (
        "chains.xyz", 50, "2 - 10, mean 5.8", "1 - 2, mean 1.66", "100 %", "100 %", "0 %",
    )  # fmt: skip
    assert single == ("single.xyz", 10, "1", "0", "0 %", "0 %", "0 %")


def test_labels_elements_groups_and_sizes(tables):
    labels = {row[0]: row[1:] for row in tables["Labels"].rows}
    assert labels["energy"] == (50, "83.3 %", "-2 to -2, mean -2 eV/atom")
    assert labels["forces"][2] == "RMS 0.5, largest component 0.5 eV/Å"
    assert labels["no label at all"][:1] == (10,)
    assert [row[0] for row in tables["Elements"].rows] == ["H", "O"]
    assert [row[:2] for row in tables["Groups"].rows] == [("chain", 50), ("(none)", 10)]
    assert tables["Sizes"].rows[0][1] == 1
    assert tables["Sizes"].rows[0][-1] == 10


def test_a_share_is_never_rounded_to_all_or_nothing():
    shares = [inspect._percent(part, 100_000) for part in (0, 1, 50_000, 99_999, 100_000)]
    assert shares == ["0 %", "< 0.1 %", "50 %", "> 99.9 %", "100 %"]


def test_plans_hold_all_structures_and_ours_is_fuller_than_a_fixed_number():
    rng = np.random.default_rng(0)
    atoms = rng.integers(1, 60, 600)
    plans = inspect.compare_plans(atoms, 20 * atoms, capacity=256, num_ranks=8)
    assert [each.plan.num_samples for each in plans] == [600, 600, 600]
    fixed, _, ours = (each.plan for each in plans)
    assert ours.imbalance < 1.02 < fixed.imbalance
    assert ours.fill > 0.9
    table = inspect.plan_table(plans, 256, 8, "atoms", "structures")
    assert [row[0].split()[0] for row in table.rows] == ["fixed", "Algorithm", "balanced"]
    assert table.rows[2][3] == pytest.approx(100 * ours.fill)


def test_a_structure_above_capacity_gets_a_batch_of_its_own():
    atoms = np.array([300, *[10] * 50])
    plans = inspect.compare_plans(atoms, atoms, capacity=100, num_ranks=2)
    assert all(each.plan.num_samples == 51 for each in plans)


def test_command_prints_tables_and_writes_figures(store, tmp_path, capsys):
    tables, page = inspect_store(store.path, tmp_path / "out", PlanOptions(ranks=4))
    show_tables(tables)
    text = capsys.readouterr().out
    for words in ("chains.xyz", "neighbours", "balanced"):
        assert words in text
    assert page.stat().st_size > 50_000
    names = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert names == ["neighbours.png", "plan.png", "sizes_atoms.png", "sizes_edges.png"]


def test_something_else_is_refused(tmp_path):
    with pytest.raises(StoreError):
        inspect_store(tmp_path)


def test_files_are_named_without_the_folders_that_they_share():
    sources = ["/data/set/a/train.xyz", "/data/set/b/train.xyz"]
    names = [inspect._file_name(sources, number) for number in "012"]
    assert names == ["a/train.xyz", "b/train.xyz", "file 2"]
