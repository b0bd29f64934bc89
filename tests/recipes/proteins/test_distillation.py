"""Sets of predicted structures: uncertain residues are not observed, stores drawn by shares."""

import numpy as np
import protein_texts as proteins
import pytest

from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.sample import SampleSizes
from bevatron.errors import ConfigError, DataError
from bevatron.recipes.alphafold2 import inspect
from bevatron.recipes.alphafold2.data import ChainDataConfig, load_chains
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold3.data import ComplexDataConfig, load_complexes
from bevatron.recipes.alphafold3.stores import open_complexes, prepare_complexes
from bevatron.recipes.proteins.stores import stores_of

SURE = np.array([number not in {1, 2, 7} for number in range(len(proteins.RESIDUES))])


@pytest.fixture
def predicted(tmp_path):
    """A file in which some residues are uncertain, and the components of its residues."""
    tables = proteins.tables_of()
    places = [int(number) - 1 for number in tables["atom_site"]["label_seq_id"]]
    tables["atom_site"]["B_iso_or_equiv"] = [90.0 if SURE[place] else 31.0 for place in places]
    del tables["refine"]
    path = tmp_path / "p.cif"
    path.write_bytes(proteins.cif(tables=tables))
    (tmp_path / "components.cif").write_bytes(proteins.COMPONENTS)
    return path


def complexes(files, out, **options):
    components = str(files[0].with_name("components.cif"))
    return prepare_complexes(
        files, out, components=components, keep_all=True, workers=0, progress=False, **options
    )


def chains(files, out, **options):
    return prepare_chains(files, out, workers=0, progress=False, **options)


def test_uncertain_residues_of_chains_are_not_observed(predicted, tmp_path):
    chains([predicted], tmp_path / "s", lowest_plddt=50.0)
    chains([predicted], tmp_path / "all")
    rows = dict(inspect.describe(open_chains(tmp_path / "s"))[0].rows)
    assert rows["lowest_plddt"] == "50.0"
    (entry,), (whole,) = open_chains(tmp_path / "s"), open_chains(tmp_path / "all")
    np.testing.assert_array_equal(entry["all_atom_mask"].any(axis=1), SURE)
    assert whole["all_atom_mask"].any(axis=1).all()
    np.testing.assert_array_equal(entry["aatype"], whole["aatype"])
    assert not entry["all_atom_positions"][~SURE].any()


def test_uncertain_residues_of_complexes_are_not_observed(predicted, tmp_path):
    complexes([predicted], tmp_path / "s", lowest_plddt=50.0)
    (entry,) = open_complexes(tmp_path / "s")
    tokens = np.repeat(np.arange(len(entry["num_atoms"])), entry["num_atoms"])
    sure = np.tile(SURE, 2)  # the assembly has two copies
    seen = np.bincount(tokens, weights=entry["resolved"], minlength=len(sure)) > 0
    np.testing.assert_array_equal(seen, sure)
    assert len(entry["restype"]) == len(sure)


@pytest.mark.parametrize("values", [("0.2", "0.9"), ("-5", "90"), ("10", "140")])
def test_b_factors_that_are_no_plddt_are_refused(tmp_path, values):
    tables = proteins.tables_of()
    number = len(tables["atom_site"]["B_iso_or_equiv"])
    tables["atom_site"]["B_iso_or_equiv"] = [values[place % 2] for place in range(number)]
    path = tmp_path / "p.cif"
    path.write_bytes(proteins.cif(tables=tables))
    with pytest.raises(DataError, match=rf"p\.cif.*B-factors are {values[0]} to {values[1]}; "):
        chains([path], tmp_path / "s", lowest_plddt=50.0, strict=True)


@pytest.mark.parametrize("lowest", [-1.0, 0.5, 100.0, np.nan])
def test_thresholds_that_no_residue_or_every_residue_passes_are_refused(
    predicted, tmp_path, lowest
):
    for prepare in (chains, complexes):
        with pytest.raises(ConfigError, match=f"1 or more and less than 100, got {lowest:g}"):
            prepare([predicted], tmp_path / "s", lowest_plddt=lowest)
    assert not (tmp_path / "s").exists()


def test_another_threshold_is_another_store(predicted, tmp_path):
    chains([predicted], tmp_path / "s", lowest_plddt=50.0)
    with pytest.raises(DataError, match="lowest_plddt was 50"):
        chains([predicted], tmp_path / "s", lowest_plddt=70.0)
    chains([predicted], tmp_path / "known")
    assert "lowest_plddt" not in open_chains(tmp_path / "known").manifest["settings"]


@pytest.fixture
def stores(predicted, tmp_path):
    """Two stores of each kind, in folders of one name."""
    for prepare, kind in ((chains, "chains"), (complexes, "complexes")):
        for where in ("known", "predicted"):
            (tmp_path / kind / where).mkdir(parents=True)
            prepare([predicted], tmp_path / kind / where / "s")
    return tmp_path


def mixtures(stores, **options):
    def config(of, kind):
        train = (stores / kind / "known/s", stores / kind / "predicted/s")
        return of(train=train, valid_size=0.0, **options)

    sizes = ChainSizes(8, 2, 2)
    yield load_chains(config(ChainDataConfig, "chains"), sizes, 1).draws(sizes, 0)
    whole = SampleSizes()
    yield load_complexes(config(ComplexDataConfig, "complexes"), whole).draws(whole, 0)


@pytest.mark.parametrize(("shares", "second"), [((), 0.5), ((1.0, 3.0), 0.75), ((4.0, 1.0), 0.2)])
def test_stores_are_drawn_by_their_shares(stores, shares, second):
    for draws in mixtures(stores, shares=shares):
        assert draws.take(0, 4000)[0].mean() == pytest.approx(second, abs=0.03)
        assert set(draws.summary()) == {"s (1)", "s (2)"}


def test_a_part_of_one_store_among_others_is_validated_on_with_a_warning(stores):
    for of, kind in ((ChainDataConfig, "chains"), (ComplexDataConfig, "complexes")):
        first, second = stores / kind / "known/s", stores / kind / "predicted/s"
        said = of(train=(first, second)).warnings()
        part = f"a part of {first} is held out for validation"
        assert said == [f"warning: {part}, but other stores may hold its like; give data.valid"]
        assert not of(train=(first, second), valid_size=0.0).warnings()
        assert not of(train=(first,), valid=(second,)).warnings()
        assert not of(train=(first,)).warnings()


@pytest.mark.parametrize(
    ("shares", "says"),
    [((1.0,), "has 1 number for 2 stores"), ((1.0, 0.0), "above 0"), ((1.0, np.nan), "above 0")],
)
def test_shares_that_are_not_one_number_above_0_for_each_store_are_refused(stores, shares, says):
    with pytest.raises(ConfigError, match=rf"data\.shares: .*{says}"):
        next(mixtures(stores, shares=shares))


def test_what_is_prepared_keeps_its_place_among_stores(stores, tmp_path):
    folder, out = tmp_path / "files", tmp_path / "out"
    folder.mkdir()
    first, second = stores / "chains/known/s", stores / "chains/predicted/s"
    for given, expected in [
        ((folder, first), (out, first)),
        ((first, folder, second, folder), (first, out, second)),
        ((first, second), (first, second)),
    ]:
        assert stores_of(given, out, lambda files, to: ["done"]) == expected
