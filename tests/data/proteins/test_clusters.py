"""Clusters: relatives together, strangers apart, files and mmseqs2 read as they are."""

import numpy as np
import pytest

from bevatron.data.proteins.clusters import (
    IDENTITY,
    alignment_identities,
    cluster_proteins,
    read_clusters,
    similar_to_earlier,
)
from bevatron.errors import DataError

LETTERS = np.array(list("ARNDCQEGHILKMFPSTWYV"))


def random_protein(rng, length):
    return "".join(rng.choice(LETTERS, length))


def relative(rng, sequence, kept):
    """Each residue stays with that probability; some are lost or added."""
    out = []
    for letter in sequence:
        if rng.random() < 0.01:
            continue
        if rng.random() < 0.01:
            out.append(str(rng.choice(LETTERS)))
        out.append(letter if rng.random() < kept else str(rng.choice(LETTERS)))
    return "".join(out)


def exact_identity(first, second):
    """Equal pairs of the best alignment, by the textbook's table."""
    first, second = sorted((first, second), key=len, reverse=True)
    best = np.zeros((len(first) + 1, len(second) + 1))
    for i, a in enumerate(first, start=1):
        for j, b in enumerate(second, start=1):
            pair = best[i - 1, j - 1] + (1.0 if a == b else -0.25)
            best[i, j] = max(pair, best[i - 1, j] - 0.5, best[i, j - 1] - 0.5)
    return max(best[-1].max(), best[:, -1].max())


def codes(sequence):
    return np.array([np.flatnonzero(x == LETTERS)[0] for x in sequence], dtype=np.int64)


def identity(first, second):
    longer, shorter = sorted((codes(first), codes(second)), key=len, reverse=True)
    return float(alignment_identities([longer], shorter)[0])


def test_identity_is_that_of_the_alignment_by_hand():
    assert identity("ARNDCQEG", "ARNDCQEG") == 1.0
    assert identity("ARNDCQEG", "ARNCQEG") == 7 / 8  # a gap
    assert identity("ARNDCQEG", "ARNWCQEG") == 7 / 8
    assert identity("ARNDCQEG", "NDCQ") == 0.5  # ends are free
    assert identity("NDCQ", "ARNDCQEG") == 0.5
    assert identity("AAAA", "RRRR") == 0.0


def test_no_alignment_scores_better():
    rng = np.random.default_rng(1)
    for _ in range(12):
        first = random_protein(rng, int(rng.integers(5, 30)))
        second = relative(rng, first, 0.5)
        longer = max(len(first), len(second))
        found = identity(first, second) * longer
        # The score is at most the number of equal pairs.
        assert found >= exact_identity(first, second) - 1e-9


def test_sequences_compared_at_once_have_the_identities_of_each_alone():
    rng = np.random.default_rng(2)
    shorter = random_protein(rng, 40)
    others = [relative(rng, shorter, kept) + "AR" * 4 for kept in (0.9, 0.6, 0.3)]
    others += [random_protein(rng, int(length)) for length in (40, 47, 90)]
    found = alignment_identities([codes(other) for other in others], codes(shorter))
    assert found.tolist() == [identity(other, shorter) for other in others]
    assert len(set(found.tolist())) > 3


def test_relatives_are_together_and_strangers_apart():
    rng = np.random.default_rng(0)
    families = [random_protein(rng, int(length)) for length in (60, 100, 150, 220, 300)]
    names, sequences = [], []
    for family, ancestor in enumerate(families):
        for kept in (1.0, 0.95, 0.75):
            names.append(family)
            sequences.append(relative(rng, ancestor, kept))
    sequences += [random_protein(rng, 120) for _ in range(6)]
    names += list(range(5, 11))
    order = rng.permutation(len(sequences))
    found = similar_to_earlier([sequences[i] for i in order])
    assert len(set(found.tolist())) == 11
    for place, representative in enumerate(found.tolist()):
        assert names[order[place]] == names[order[representative]]
        assert len(sequences[order[representative]]) >= len(sequences[order[place]])


def test_a_piece_of_a_protein_is_not_its_relative():
    rng = np.random.default_rng(2)
    whole = random_protein(rng, 200)
    assert similar_to_earlier([whole, whole[:100]]).tolist() == [0, 1]
    assert similar_to_earlier([whole, whole[:190]]).tolist() == [0, 0]


def test_peptides_unknown_residues_and_nothing_do_no_harm():
    assert similar_to_earlier(["AR", "", "XXXXXXXX", "ARNDXCQEGXHIL"]).tolist() == [0, 1, 2, 3]
    assert cluster_proteins({}, mmseqs="no such program") == {}


def test_clusters_are_numbered_by_their_first_members():
    rng = np.random.default_rng(3)
    first, second = random_protein(rng, 80), random_protein(rng, 90)
    found = cluster_proteins({50: first, 7: second, 9: first}, IDENTITY, mmseqs="no such program")
    assert found == {50: 0, 7: 1, 9: 0}


def test_mmseqs_is_called_where_it_is_installed(tmp_path):
    program = tmp_path / "mmseqs"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = easy-cluster ] || exit 3\n'
        "printf '12\\t12\\n12\\t30\\n4\\t4\\n' > \"$3_cluster.tsv\"\n"
    )
    program.chmod(0o755)
    sequences = {4: "ARNDARND", 12: "CQEGCQEG", 30: "CQEGCQEC"}
    assert cluster_proteins(sequences, mmseqs=str(program)) == {4: 0, 12: 1, 30: 1}
    program.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 1\n")
    with pytest.raises(DataError, match="could not cluster 3 proteins: out of memory"):
        cluster_proteins(sequences, mmseqs=str(program))


def test_both_kinds_of_files_are_read(tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("1abc_A 2def_B\n\n3ghi_A\n")
    found = read_clusters(lines)
    assert found["1abc_A"] == found["2def_B"] != found["3ghi_A"]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a\ta\na\tb\nc\tc\n")
    found = read_clusters(pairs)
    assert found["a"] == found["b"] != found["c"]
    lines.write_text("a b\nc a\n")
    with pytest.raises(DataError, match=r"lines.txt, line 2: 'a' is in an earlier cluster"):
        read_clusters(lines)
