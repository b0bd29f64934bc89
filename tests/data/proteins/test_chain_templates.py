"""Templates of a chain: filters, places and what is stored."""

import datetime as dt

import numpy as np
import pytest

from bevatron.data.proteins.chain_templates import (
    TEMPLATE_FIELDS,
    Template,
    chain_templates,
    find_target,
    place_template,
    stored_templates,
)
from bevatron.data.proteins.chains import atoms37
from bevatron.data.readers.proteins import parse_hits, read_hits, read_structure


@pytest.fixture(scope="module")
def haemoglobin(shared):
    return read_structure(shared / "data/proteins/mmcif/4hhb.cif.gz")


def rows(*hits):
    """Hits in MMseqs2's columns: target, first query residue, first target residue, cigar."""
    lines = []
    for target, query, first, cigar in hits:
        count = dict.fromkeys("MID", 0)
        for part in cigar.replace("M", "M ").replace("I", "I ").replace("D", "D ").split():
            count[part[-1]] += int(part[:-1])
        width = sum(count.values())
        ends = (query + count["M"] + count["I"] - 1, first + count["M"] + count["D"] - 1)
        lines.append(
            f"q\t{target}\t0.9\t{width}\t0\t0\t{query}\t{ends[0]}\t{first}\t{ends[1]}\t1e-9\t70\t{cigar}"
        )
    return parse_hits("\n".join(lines).encode() + b"\n", "hits.m8", "m8")


def test_atoms_lie_at_the_residues_that_they_are_aligned_to(haemoglobin):
    hits = rows(("4hhb_B", 3, 11, "20M2I30M"))
    part = find_target(hits, 0, haemoglobin)
    found = place_template(hits, 0, haemoglobin, part, 60)
    chain = int(np.flatnonzero(haemoglobin.chains.author == "B")[0])
    positions, mask = atoms37(haemoglobin, chain)
    centre = positions[mask].mean(0)
    sequence = haemoglobin.sequence(chain)
    for query, target in ((2, 10), (21, 29), (24, 30), (53, 59)):
        assert np.array_equal(found.mask[query], mask[target])
        known = mask[target]
        assert np.allclose(found.positions[query][known], positions[target][known] - centre)
        assert "ARNDCQEGHILKMFPSTWYV"[found.aatype[query]] == sequence[target]
    for query in (0, 1, 22, 23, 54, 59):
        assert found.aatype[query] == 21
        assert not found.mask[query].any()
        assert not found.positions[query].any()


def test_a_hit_with_a_sequence_is_found_by_it(shared):
    hits = read_hits(shared / "data/proteins/format_samples/1a2y_B.pdb70_hits.hhr.gz")
    hit = hits.targets.index("1IGY_D")
    structure = read_structure(shared / "data/proteins/mmcif/1igy.cif.gz")
    part = find_target(hits, hit, structure)
    found = place_template(hits, hit, structure, part, 116)
    query = hits.pairs_of(hit)[:, 0]
    assert (found.aatype[query] < 20).all()
    assert (found.aatype != 21).sum() == len(query)
    whole = structure.sequence(part.chain)
    assert whole[part.first :].startswith(hits.sequences[hit].replace("X", whole[part.first]))
    # Neighbours in query and template are neighbours in space.
    pairs = hits.pairs_of(hit)
    joined = (np.diff(pairs, axis=0) == 1).all(1)
    joined &= found.mask[pairs[:-1, 0], 1] & found.mask[pairs[1:, 0], 1]
    steps = found.positions[pairs[1:, 0], 1] - found.positions[pairs[:-1, 0], 1]
    assert np.abs(np.linalg.norm(steps[joined], axis=-1) - 3.8).max() < 1.0


def test_templates_that_may_not_be_used_are_left_out(haemoglobin):
    chain = int(np.flatnonzero(haemoglobin.chains.author == "A")[0])
    copy = haemoglobin.sequence(chain)
    hits = rows(
        ("4hhb_A", 1, 1, "141M"),  # the chain itself
        ("4hhb_B", 1, 1, "14M"),  # too little of the chain
        ("4hhb_Q", 1, 1, "141M"),  # no such chain
        ("4hhb_B", 1, 100, "80M"),  # beyond the end of the template
        ("9xyz_A", 1, 1, "141M"),  # no structure
        ("4hhb_B", 1, 1, "100M"),
    )

    def opened(code):
        return haemoglobin if code == "4hhb" else None

    found = chain_templates(copy, hits, opened, None, {})
    assert len(found["template_aatype"]) == 141
    for field in TEMPLATE_FIELDS:
        field.check(found[field.name])


@pytest.mark.parametrize(
    ("released", "listed", "expected"),
    [
        (dt.date(1984, 9, 15), None, 1),
        (dt.date(1984, 9, 14), None, 0),
        (dt.date(2020, 1, 1), dt.date(2019, 12, 1), 0),
        (dt.date(1980, 1, 1), dt.date(1979, 1, 1), 1),
        (None, None, 1),
    ],
)
def test_templates_are_sixty_days_older_than_the_chain(haemoglobin, released, listed, expected):
    assert haemoglobin.released == dt.date(1984, 7, 17)
    dates = {"4hhb": listed} if listed else {}
    hits = rows(("4hhb_B", 1, 1, "100M"))
    found = chain_templates("A" * 141, hits, lambda code: haemoglobin, released, dates)
    assert len(found["template_aatype"]) == expected * 141


def test_the_first_twenty_are_kept(haemoglobin):
    hits = rows(*(("4hhb_B", 1, 1, "100M") for _ in range(23)))
    found = chain_templates("A" * 120, hits, lambda code: haemoglobin, None, {})
    assert len(found["template_aatype"]) == 20 * 120


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
    found = chain_templates("A" * 30, parse_hits(b"", "hits.m8", "m8"), lambda code: None, None, {})
    for field in TEMPLATE_FIELDS:
        field.check(found[field.name])
        assert len(found[field.name]) == 0
