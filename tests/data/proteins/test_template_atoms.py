"""Templates of a chain: where their atoms are and what is stored."""

import datetime as dt

import numpy as np
import pytest

from bevatron.data.proteins.chains import atoms37
from bevatron.data.proteins.template_atoms import (
    TEMPLATE_FIELDS,
    Template,
    chain_templates,
    place_template,
    stored_templates,
)
from bevatron.data.readers.proteins import parse_hits, read_hits, read_structure


@pytest.fixture(scope="module")
def haemoglobin(shared):
    return read_structure(shared / "data/proteins/mmcif/4hhb.cif.gz")


def test_atoms_lie_at_the_residues_that_they_are_aligned_to(haemoglobin):
    chain = int(np.flatnonzero(haemoglobin.chains.author == "B")[0])
    pairs = np.array([[2, 10], [3, 11], [21, 29], [24, 30], [53, 59]])
    found = place_template(haemoglobin, chain, pairs, 60)
    positions, mask = atoms37(haemoglobin, chain)
    centre = positions[mask].mean(0)
    sequence = haemoglobin.sequence(chain)
    for query, target in pairs.tolist():
        known = mask[target]
        assert np.array_equal(found.mask[query], known)
        assert np.allclose(found.positions[query][known], positions[target][known] - centre)
        assert not found.positions[query][~known].any()
        assert "ARNDCQEGHILKMFPSTWYV"[found.aatype[query]] == sequence[target]
    others = np.setdiff1d(np.arange(60), pairs[:, 0])
    assert (found.aatype[others] == 21).all()
    assert not found.mask[others].any()


def test_hits_of_a_search_become_templates(shared, haemoglobin):
    hits = read_hits(shared / "data/proteins/templates/template_hits.tsv.gz")
    number = hits.queries.index("102m_A")
    sequence = read_structure(shared / "data/proteins/mmcif/102m.cif.gz").sequence(0)
    length = len(sequence)

    def opened(code):
        return haemoglobin if code == "4hhb" else None

    found = chain_templates(sequence, hits, opened)
    for field in TEMPLATE_FIELDS:
        field.check(found[field.name])
    aligned = np.isin(np.arange(length), hits.pairs_of(number)[:, 0])
    assert np.array_equal(found["template_aatype"][:length] != 21, aligned)
    assert found["template_torsions_mask"][:length][aligned, 2].mean() > 0.95
    # Neighbours in the chain are neighbours in space.
    ca, known = found["template_positions"][:length, 1], found["template_atom_mask"][:length, 1]
    step = np.linalg.norm(np.diff(ca, axis=0), axis=-1)[known[1:] & known[:-1]]
    assert abs(np.median(step) - 3.8) < 0.05


@pytest.mark.parametrize(("days", "expected"), [(60, True), (59, False)])
def test_templates_are_at_least_sixty_days_older_than_the_chain(
    shared, haemoglobin, days, expected
):
    hits = read_hits(shared / "data/proteins/templates/template_hits.tsv.gz")
    released = haemoglobin.released + dt.timedelta(days=days)
    found = chain_templates("A" * 153, hits, lambda code: haemoglobin, [released])
    assert bool(len(found["template_aatype"])) == expected


@pytest.mark.parametrize("chain", ["1ckb_A", "1d66_A"])
def test_stored_templates_are_those_of_the_reference(shared, chain):
    stored = np.load(shared / f"golden/alphafold2/features_nonensembled_{chain}.npz")
    templates = [
        Template(aatype.astype(np.int8), positions, mask > 0)
        for aatype, positions, mask in zip(
            stored["template_aatype"],
            stored["in__template_all_atom_positions"],
            stored["in__template_all_atom_mask"],
            strict=True,
        )
    ]
    length = stored["template_aatype"].shape[1]
    found = stored_templates(templates, length)
    mask = stored["template_torsion_angles_mask"].reshape(-1, 7)
    assert np.array_equal(found["template_torsions_mask"], mask > 0)
    torsions = stored["template_torsion_angles_sin_cos"].reshape(-1, 7, 2) * mask[..., None]
    # The reference is 5e-5 from exact arithmetic.
    assert np.abs(found["template_torsions"] * mask[..., None] - torsions).max() < 1e-4
    positions = stored["template_all_atom_positions"][:, :, :4].reshape(-1, 4, 3)
    assert np.array_equal(found["template_positions"], positions)


def test_a_chain_without_hits_has_no_templates():
    found = chain_templates("A" * 30, parse_hits(b"", "hits.m8", "m8"), lambda code: None)
    for field in TEMPLATE_FIELDS:
        field.check(found[field.name])
        assert len(found[field.name]) == 0
