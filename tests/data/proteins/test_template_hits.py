"""Templates of a sequence: which hits are taken, and the atoms at the aligned residues."""

import datetime as dt
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from bevatron.data.proteins.template_atoms import chain_templates
from bevatron.data.proteins.template_hits import EMBARGO, MAX_TEMPLATES, usable_hits
from bevatron.data.proteins.template_search import queries_of
from bevatron.data.proteins.templates import Templates
from bevatron.data.readers.proteins.alphabet import CLASSES, GAP
from bevatron.data.readers.proteins.hits import parse_hits, read_hits
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.errors import DataError

pytestmark = pytest.mark.shared
COLUMNS = ["query", "target", "qstart", "qend", "tstart", "tend", "evalue", "bits", "qaln", "taln"]


@pytest.fixture
def entries(shared):
    """Function that opens an entry, None if it is not among the shared ones."""

    @cache
    def opened(code):
        for folder in ("proteins", "complexes"):
            path = shared / f"data/{folder}/mmcif/{code}.cif.gz"
            if path.exists():
                return read_structure(path)
        return None

    return opened


def hits_of(*rows):
    text = "\n".join("\t".join(str(row[key]) for key in COLUMNS) for row in rows)
    return parse_hits(("\t".join(COLUMNS) + "\n" + text).encode(), "hits.tsv", "m8")


def find_templates(sequence, hits, entries, released=None):
    stored = chain_templates(sequence, hits, entries, [released])
    return Templates.of(stored, len(sequence))


def row(target, sequence, first=1, query=None):
    query = query or sequence
    ends = {"qstart": 1, "qend": len(query), "tstart": first, "tend": first + len(sequence) - 1}
    return {"query": "q", "target": target, "evalue": 1e-9, "bits": 99, **ends} | {
        "qaln": query,
        "taln": sequence,
    }


def test_atoms_of_hits_stand_at_the_aligned_residues(shared, entries):
    hits = read_hits(shared / "data/proteins/templates/template_hits.tsv.gz")
    number = hits.queries.index("102m_A")
    sequence = entries("102m").sequence(0)
    found = find_templates(sequence, hits, entries)
    structure = entries("4hhb")
    pairs = hits.pairs_of(number)
    restype = found.restype[0]
    aligned = np.isin(np.arange(len(sequence)), pairs[:, 0])
    assert (restype[~aligned] == GAP).all()
    assert not found.backbone_mask[0][~aligned].any()
    letters = "".join(CLASSES[i] for i in restype[pairs[:, 0]])
    assert letters == "".join(structure.sequence(0)[j] for j in pairs[:, 1])
    shifts = []  # a template is centred
    for place, target in pairs[::17].tolist():
        atoms = slice(*structure.residues.atom_ptr[target : target + 2])
        named = dict(zip(structure.atoms.name[atoms], structure.atoms.position[atoms], strict=True))
        expected = np.stack([named[name] for name in ("N", "CA", "C")])
        shifts += list(found.backbone[0, place] - expected)
        beta = "CA" if structure.residues.component[target] == "GLY" else "CB"
        shifts.append(found.pseudo_beta[0, place] - named[beta])
        assert found.backbone_mask[0, place]
        assert found.pseudo_beta_mask[0, place]
    assert np.ptp(shifts, axis=0).max() < 1e-4


def test_hits_of_a_real_search_are_placed_in_their_chains(shared, entries):
    hits = read_hits(shared / "data/proteins/format_samples/1a2y_B.pdb70_hits.hhr.gz")
    sequence = "X" * int(hits.query_ranges.max())
    found = find_templates(sequence, hits, entries)
    places = [hits.targets.index(target) for target in ("1IGY_D", "1NCB_H")]
    sizes = [len(hits.pairs_of(place)) for place in places]
    assert (found.restype != GAP).sum(axis=1).tolist() == sizes
    assert (found.backbone_mask.sum(axis=1) > 0.9 * np.array(sizes)).all()
    # N, CA and C of a residue are as far apart as in any protein.
    known = found.backbone[found.backbone_mask]
    assert np.linalg.norm(known[:, 1] - known[:, 0], axis=1) == pytest.approx(1.46, abs=0.1)
    assert np.linalg.norm(known[:, 2] - known[:, 1], axis=1) == pytest.approx(1.52, abs=0.1)


def test_copies_of_the_query_and_short_hits_are_no_templates(entries):
    sequence = entries("4hhb").sequence(0)
    whole, part = row("4hhb_A", sequence), row("4hhb_A", sequence[20:60], 21)
    part |= {"qstart": 21, "qend": 60}
    tiny = row("4hhb_A", sequence[:9])
    found = find_templates(sequence, hits_of(whole, tiny, part), entries)
    assert found.backbone_mask.sum(axis=1).tolist() == [40]


def test_only_entries_released_long_before_are_templates(entries):
    sequence = entries("4hhb").sequence(0)
    hits = hits_of(row("4hhb_A", sequence[:100]))
    released = entries("4hhb").released
    for days, number in ((59, 0), (60, 1)):
        day = released + dt.timedelta(days=days)
        assert len(find_templates(sequence, hits, entries, day).restype) == number

    def undated(code):
        return replace(entries(code), released=None)

    assert not len(find_templates(sequence, hits, undated, dt.date.max).restype)
    assert len(find_templates(sequence, hits, undated).restype) == 1


def test_chains_of_other_dates_have_templates_of_their_own(entries):
    sequence = entries("4hhb").sequence(0)
    hits = hits_of(*(row(f"{code}_A", sequence[: 60 + i]) for i, code in enumerate("abc")))
    days = [dt.date(2000 + i, 1, 1) for i in range(3)]

    def opened(code):
        return replace(entries("4hhb"), released=days["cba".index(code)])

    def first(*released, most):
        until = [day and day - EMBARGO for day in released]
        found = usable_hits(sequence, hits, opened, until=until, most=most)
        return [structure.released.year for structure, _, _ in found]

    assert first(dt.date(2001, 6, 1), most=1) == [2001]
    assert first(dt.date(2000, 6, 1), most=1) == [2000]
    assert first(dt.date(2000, 6, 1), dt.date(2001, 6, 1), None, most=1) == [2002, 2001, 2000]
    assert first(dt.date(2000, 6, 1), dt.date(2001, 6, 1), None, most=2) == [2002, 2001, 2000]


def test_a_hit_that_is_numbered_otherwise_is_found_by_its_sequence(entries):
    sequence = entries("4hhb").sequence(0)
    shifted = row("4hhb_A", sequence[30:90], 1)
    found = find_templates(sequence[30:100], hits_of(shifted), entries)
    expected = find_templates(
        sequence[30:100], hits_of(row("4hhb_A", sequence[30:90], 31)), entries
    )
    assert found.backbone_mask.sum() == 60
    for name, values in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), values, name)


def test_a_hit_of_another_chain_or_without_a_structure_is_left_out(entries):
    sequence = entries("4hhb").sequence(0)
    strange = row("4hhb_A", "W" * 60, query=sequence[:60])
    missing, no_chain = row("0xyz_A", sequence[:60]), row("4hhb_Q", sequence[:60])
    found = find_templates(sequence, hits_of(strange, missing, no_chain), entries)
    shapes = {name: values.shape for name, values in vars(found).items()}
    length = len(sequence)
    assert shapes == {
        "restype": (0, length),
        "pseudo_beta": (0, length, 3),
        "pseudo_beta_mask": (0, length),
        "backbone": (0, length, 3, 3),
        "backbone_mask": (0, length),
    }


def test_twenty_are_kept(entries):
    sequence = entries("4hhb").sequence(0)
    hits = hits_of(*(row("4hhb_A", sequence[: 60 + i]) for i in range(25)))
    found = find_templates(sequence, hits, entries)
    assert found.backbone_mask.sum(axis=1).tolist() == list(range(60, 60 + MAX_TEMPLATES))


def test_a_file_of_hits_that_was_replaced_is_read_anew(tmp_path):
    file = tmp_path / "hits.m8"
    line = "{}\t1abc_A\t90.0\t20\t0\t0\t1\t20\t1\t20\t1e-9\t80\n"
    for names in (("one",), ("two", "three")):
        file.write_text("".join(line.format(name) for name in names))
        assert queries_of(file) == names
    file.unlink()
    with pytest.raises(DataError, match=r"hits\.m8"):
        queries_of(file)
