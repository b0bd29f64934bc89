"""Inputs of predictions: every format gives the same complex; what does not fit is named."""

import json

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.readers.proteins import read_inputs
from bevatron.data.readers.proteins.inputs import AtomName, Complex, Entity, Modification, Template
from bevatron.errors import DataError

ALPHAFOLD3 = {
    "name": "job",
    "modelSeeds": [1, 2],
    "sequences": [
        {
            "protein": {
                "id": ["A", "B"],
                "sequence": "PVLSCGEWQL",
                "modifications": [{"ptmType": "HY3", "ptmPosition": 1}],
                "unpairedMsaPath": "msa/a.a3m",
                "pairedMsa": "",
                "templates": [
                    {"mmcifPath": "t.cif", "queryIndices": [0, 1], "templateIndices": [3, 5]}
                ],
                "description": "a dimer",
            }
        },
        {"rna": {"id": "C", "sequence": "AGCU", "unpairedMsa": ">q\nAGCU\n"}},
        {
            "dna": {
                "id": "D",
                "sequence": "GACC",
                "modifications": [{"modificationType": "6OG", "basePosition": 1}],
            }
        },
        {"ligand": {"id": ["E"], "ccdCodes": ["NAG", "BMA"]}},
        {"ligand": {"id": "F", "smiles": "CC(=O)O"}},
    ],
    "bondedAtomPairs": [[["A", 5, "SG"], ["E", 1, "C1"]], [["E", 1, "O4"], ["E", 2, "C1"]]],
    "userCCDPath": "own.cif",
    "dialect": "alphafold3",
    "version": 4,
}
BOLTZ = """
version: 1
sequences:
  - protein: {id: [A, B], sequence: PVLSCGEWQL, msa: msa/a.a3m, cyclic: true,
              modifications: [{position: 1, ccd: HY3}]}
  - rna: {id: C, sequence: AGCU}
  - dna: {id: D, sequence: gacc, modifications: [{position: 1, ccd: 6OG}]}
  - ligand: {id: NO, ccd: 004}
  - ligand: {id: [F, 7], smiles: 'N[C@@H](C)C(=O)O'}
  - protein: {id: G, sequence: MK, msa: empty}
constraints:
  - bond: {atom1: [A, 5, SG], atom2: [NO, 1, C1]}
  - pocket: {binder: F, contacts: [[A, 3]]}
templates:
  - {cif: t.cif, chain_id: [A, B], template_id: [X, Y]}
  - {pdb: u.pdb, force: true, threshold: 3}
properties:
  - affinity: {binder: F}
"""
PROTENIX = [
    {
        "name": "one",
        "modelSeeds": ["5"],
        "sequences": [
            {
                "proteinChain": {
                    "sequence": "PVLSCGEWQL",
                    "count": 2,
                    "modifications": [{"ptmType": "CCD_HY3", "ptmPosition": 1}],
                    "msa": {"precomputed_msa_dir": "msa/1", "pairing_db": "uniref100"},
                }
            },
            {
                "dnaSequence": {
                    "sequence": "GACC",
                    "count": 1,
                    "modifications": [{"modificationType": "CCD_6OG", "basePosition": 1}],
                }
            },
            {"rnaSequence": {"sequence": "AGCU", "count": 1, "unpairedMsaPath": "r.a3m"}},
            {"ligand": {"ligand": "CCD_NAG_BMA", "count": 2}},
            {"ligand": {"ligand": "CC(=O)O", "count": 1, "id": ["B"]}},
            {"ligand": {"ligand": "FILE_atp.sdf", "count": 1}},
            {"ion": {"ion": "MG", "count": 2}},
        ],
        "covalent_bonds": [
            {"entity1": "1", "position1": "5", "atom1": "SG"}
            | {"entity2": "4", "position2": 1, "atom2": "C1"},
            {"left_entity": 4, "left_copy": 2, "left_position": 1, "left_atom": "O4"}
            | {"right_entity": 5, "right_copy": 1, "right_position": 1, "right_atom": 2},
        ],
        "constraint": {"pocket": {}},
    },
    {"name": "two", "sequences": [{"proteinChain": {"sequence": "MK"}}]},
]


def one_sentence(error):
    assert "\n" not in str(error)


def write(path, value):
    text = value if isinstance(value, str) else json.dumps(value)
    path.write_text(text)
    return path


def test_a_job_of_alphafold3_is_read(tmp_path):
    (found,) = read_inputs(write(tmp_path / "job.json", ALPHAFOLD3))
    protein, rna, dna, glycan, ligand = found.entities
    assert (protein.kind, protein.chains, protein.sequence) == ("protein", ("A", "B"), "PVLSCGEWQL")
    assert protein.modifications == (Modification(1, "HY3"),)
    assert (protein.unpaired, protein.paired) == (tmp_path / "msa" / "a.a3m", "")
    assert protein.description == "a dimer"
    template = protein.templates[0]
    assert template.structure == tmp_path / "t.cif"
    assert template.pairs.tolist() == [[0, 3], [1, 5]]
    assert template.pairs.dtype == np.int32
    assert rna == Entity("rna", ("C",), "AGCU", unpaired=">q\nAGCU")
    assert dna == Entity("dna", ("D",), "GACC", modifications=(Modification(1, "6OG"),))
    assert glycan == Entity("ligand", ("E",), codes=("NAG", "BMA"))
    assert ligand == Entity("ligand", ("F",), smiles="CC(=O)O")
    assert found.bonds == (
        (AtomName("A", 5, "SG"), AtomName("E", 1, "C1")),
        (AtomName("E", 1, "O4"), AtomName("E", 2, "C1")),
    )
    assert (found.name, found.seeds, found.ignored) == ("job", (1, 2), ())
    assert found.components == tmp_path / "own.cif"


def test_lists_may_hold_jobs_of_alphafold3_and_hold_one_at_least(tmp_path):
    alone = read_inputs(write(tmp_path / "job.json", ALPHAFOLD3))[0]
    found = read_inputs(write(tmp_path / "jobs.json", [ALPHAFOLD3, *PROTENIX]))
    assert [each.name for each in found] == ["job", *(job.get("name") for job in PROTENIX)]
    assert [str(e) for e in found[0].entities] == [str(e) for e in alone.entities]
    with pytest.raises(DataError, match=r"none\.json: is a list without a job"):
        read_inputs(write(tmp_path / "none.json", []))


def test_the_stop_that_ends_a_translated_gene_is_no_residue(tmp_path):
    (found,) = read_inputs(write(tmp_path / "gene.fasta", ">A|protein\nMKV\nLAT*\n"))
    assert found.entities[0].sequence == "MKVLAT"
    for text in (">A|protein\nMK*V\n", ">A|rna\nACG*\n"):
        with pytest.raises(DataError, match=r"'\*' at position . is not a residue"):
            read_inputs(write(tmp_path / "gene.fasta", text))


def test_a_complex_of_boltz_is_read(tmp_path):
    (found,) = read_inputs(write(tmp_path / "job.yaml", BOLTZ))
    templates = (
        Template(tmp_path / "t.cif", chains=("X", "Y")),
        Template(tmp_path / "u.pdb"),
    )
    assert found == Complex(
        "job",
        (
            Entity(
                "protein",
                ("A", "B"),
                "PVLSCGEWQL",
                modifications=(Modification(1, "HY3"),),
                cyclic=True,
                unpaired=tmp_path / "msa" / "a.a3m",
                templates=templates,
            ),
            Entity("rna", ("C",), "AGCU"),
            Entity("dna", ("D",), "GACC", modifications=(Modification(1, "6OG"),)),
            Entity("ligand", ("NO",), codes=("004",)),
            Entity("ligand", ("F", "7"), smiles="N[C@@H](C)C(=O)O"),
            Entity("protein", ("G",), "MK", unpaired="", templates=templates[1:]),
        ),
        ((AtomName("A", 5, "SG"), AtomName("NO", 1, "C1")),),
        ignored=(
            "constraints[1].pocket",
            "properties[0]",
            "templates[1].force",
            "templates[1].threshold",
        ),
    )


def test_jobs_of_protenix_are_read(tmp_path):
    one, two = read_inputs(write(tmp_path / "jobs.json", PROTENIX))
    assert one == Complex(
        "one",
        (
            Entity(
                "protein",
                ("A", "C"),
                "PVLSCGEWQL",
                modifications=(Modification(1, "HY3"),),
                unpaired=tmp_path / "msa" / "1" / "non_pairing.a3m",
                paired=tmp_path / "msa" / "1" / "pairing.a3m",
            ),
            Entity("dna", ("D",), "GACC", modifications=(Modification(1, "6OG"),)),
            Entity("rna", ("E",), "AGCU", unpaired=tmp_path / "r.a3m"),
            Entity("ligand", ("F", "G"), codes=("NAG", "BMA")),
            Entity("ligand", ("B",), smiles="CC(=O)O"),
            Entity("ligand", ("H",), file=tmp_path / "atp.sdf"),
            Entity("ligand", ("I", "J"), codes=("MG",)),
        ),
        (
            (AtomName("A", 5, "SG"), AtomName("F", 1, "C1")),
            (AtomName("C", 5, "SG"), AtomName("G", 1, "C1")),
            (AtomName("G", 1, "O4"), AtomName("B", 1, "2")),
        ),
        seeds=(5,),
        ignored=("[0].constraint",),
    )
    assert two == Complex("two", (Entity("protein", ("A",), "MK"),))


def test_a_job_of_the_alphafold_server_is_read(tmp_path):
    job = {
        "name": "s",
        "modelSeeds": [],
        "sequences": [
            {"proteinChain": {"sequence": "MK", "count": 1, "useStructureTemplate": False}},
            {"ion": {"ion": "NA", "count": 1}},
        ],
        "dialect": "alphafoldserver",
        "version": 1,
    }
    for value in ([job], job):
        (found,) = read_inputs(write(tmp_path / "s.json", value))
        assert [entity.chains for entity in found.entities] == [("A",), ("B",)]
        assert len(found.ignored) == 1
    job["sequences"][0]["proteinChain"]["glycans"] = [{"residues": "NAG", "position": 1}]
    with pytest.raises(DataError, match=r"glycans: does not say which atoms are bonded"):
        read_inputs(write(tmp_path / "s.json", [job]))


def test_real_jobs_of_protenix_are_read(shared):
    path = shared / "data" / "complexes" / "msa_only" / "protenix_example_complexes.json.gz"
    found = {job.name: job for job in read_inputs(path)}
    assert [entity.chains for entity in found["7pzb"].entities] == [
        ("A", "B"),
        ("C", "D"),
        ("E", "F"),
        ("G", "H"),
    ]
    assert found["7pzb"].entities[3].codes == ("PCG",)
    assert [len(entity.chains) for entity in found["7wux"].entities] == [2, 2, 1, 2, 3]
    assert found["7r6r"].entities[0].paired.name == "pairing.a3m"


def changed(job, *path, to):
    job = json.loads(json.dumps(job))
    place = job
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return job


FIRST = ("sequences", 0, "protein")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("a.txt", "", "a.txt: is not in a known format of prediction inputs"),
        ("a.json", "", "a.json, line 1, column 1: is not valid JSON"),
        ("a.json", json.dumps(ALPHAFOLD3)[:200], "a.json, line 1, column .*: is not valid JSON"),
        ("a.json", "[" * 100_000, "a.json: is nested too deeply"),
        ("a.json", '{"name": 1, "name": 2}', "the key 'name' occurs twice"),
        ("a.json", "3", "a.json: is 3; expected keys and values"),
        ("a.json", "{}", "a.json: has no 'dialect', which is needed"),
        (
            "a.json",
            changed(ALPHAFOLD3, "dialect", to="x"),
            "dialect: is 'x'; expected 'alphafold3'",
        ),
        ("a.json", changed(ALPHAFOLD3, "version", to=9), "version: is 9"),
        ("a.json", changed(ALPHAFOLD3, "sequences", to=[]), "a.json: holds no chain or ligand"),
        ("a.json", changed(ALPHAFOLD3, "modelSeed", to=[]), "'modelSeed' is unknown; known are"),
        (
            "a.json",
            changed(ALPHAFOLD3, "modelSeeds", to=[1.5]),
            r"modelSeeds\[0\]: is 1.5; expected",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "id", to=None),
            r"sequences\[0\].protein: has no 'id'",
        ),
        ("a.json", changed(ALPHAFOLD3, *FIRST, "id", to=["A", "A"]), "chain 'A' occurs twice"),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "sequence", to=""),
            "sequence: the sequence is empty",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "sequence", to="MK1"),
            "protein.sequence: '1' at position 3",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "sequence", to=["M"]),
            "sequence: is a list; expected text",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, "sequences", 2, "dna", "sequence", to="GUCC"),
            r"sequences\[2\].dna.sequence: 'U' at position 2 is not a residue of dna; write T",
        ),
        ("a.json", changed(ALPHAFOLD3, *FIRST, "seq", to="M"), "protein: 'seq' is unknown"),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "unpairedMsa", to=""),
            "both 'unpairedMsa' and 'unpairedMsaPath'",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "modifications", 0, "ptmPosition", to=11),
            "'HY3' modifies residue 11 of chain 'A', which has 10",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "modifications", 0, "ptmPosition", to="x"),
            'is "x"; expected an integer',
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "templates", 0, "queryIndices", to=[1]),
            "1 queryIndices and 2 templateIndices",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "templates", 0, "queryIndices", to=[-1, 1]),
            "negative index",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, *FIRST, "templates", 0, "mmcifPath", to=None),
            "needs either 'mmcif'",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, "sequences", 0, to={"peptide": {"id": "A"}}),
            "'peptide' is unknown",
        ),
        ("a.json", changed(ALPHAFOLD3, "sequences", 0, to={}), r"sequences\[0\]: has 0 keys"),
        (
            "a.json",
            changed(ALPHAFOLD3, "sequences", 4, "ligand", "smiles", to=None),
            "either 'ccdCodes' or",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, "bondedAtomPairs", 0, 0, 0, to="Z"),
            "a bond names chain 'Z'",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, "bondedAtomPairs", 0, 1, 1, to=3),
            "names position 3 of chain 'E', which has 2",
        ),
        (
            "a.json",
            changed(ALPHAFOLD3, "bondedAtomPairs", 0, to=[["A", 1, "N"]]),
            "has 1 atoms; expected two",
        ),
        ("a.json", changed(ALPHAFOLD3, "bondedAtomPairs", 0, 0, to=["A", 1]), "is not an atom"),
        ("a.json", changed(PROTENIX, 0, "sequences", 0, to={"chain": {}}), "'chain' is unknown"),
        ("a.json", changed(PROTENIX, 0, "sequences", 0, "proteinChain", "count", to=0), "count 0"),
        (
            "a.json",
            changed(PROTENIX, 0, "sequences", 4, "ligand", "count", to=2),
            "has 1 ids and count 2",
        ),
        (
            "a.json",
            changed(PROTENIX, 0, "sequences", 4, "ligand", "ligand", to=""),
            "'ligand' is empty",
        ),
        (
            "a.json",
            changed(PROTENIX, 0, "covalent_bonds", 0, "entity2", to=5),
            "joins 2 copies with 1",
        ),
        (
            "a.json",
            changed(PROTENIX, 0, "covalent_bonds", 0, "entity2", to=9),
            "is 9; the entities are numbered",
        ),
        (
            "a.json",
            changed(PROTENIX, 0, "covalent_bonds", 1, "left_copy", to=3),
            "is 3; there are 2 copies",
        ),
        (
            "a.json",
            changed(PROTENIX, 1, "sequence", to=[]),
            r"a.json, \[1\]: 'sequence' is unknown",
        ),
        ("a.yaml", "", "a.yaml: is null; expected keys and values"),
        ("a.yaml", "sequences: [", "a.yaml, line 1, column 13: is not valid YAML"),
        ("a.yaml", BOLTZ[:-40] + "\n\t- x", "is not valid YAML"),
        ("a.yaml", "a: 1\na: 2\n", "the key 'a' occurs twice"),
        ("a.yaml", "version: 1\n", "a.yaml: has no 'sequences'"),
        (
            "a.yaml",
            BOLTZ.replace("cyclic: true", "cyclic: maybe"),
            'cyclic: is "maybe"; expected true',
        ),
        (
            "a.yaml",
            BOLTZ.replace("position: 1", "position: one"),
            'position: is "one"; expected an int',
        ),
        ("a.yaml", BOLTZ.replace("pocket:", "cave:"), "'cave' is unknown; expected bond, pocket"),
        ("a.yaml", BOLTZ.replace("id: NO, ccd", "id: A, ccd"), "chain 'A' occurs twice"),
        ("a.yaml", BOLTZ.replace("id: NO, ccd", "id: '?', ccd"), r"hold a chain called '\?'"),
        ("a.yaml", BOLTZ.replace("id: NO, ccd", "id: ., ccd"), r"hold a chain called '\.'"),
        ("a.yaml", BOLTZ.replace("id: NO, ccd", 'id: "\\0", ccd'), "hold a chain called"),
        ("a.yaml", BOLTZ.replace("ccd: 004", "ccd: ''"), "needs either 'ccd' or 'smiles'"),
        (
            "a.yaml",
            BOLTZ.replace("chain_id: [A, B]", "chain_id: [A, C]"),
            "'C' is not a protein chain",
        ),
        ("a.yaml", BOLTZ.replace("[X, Y]", "[X, Y, Z]"), "names 2 chains and 3 of the template"),
        ("a.yaml", BOLTZ.replace("{cif: t.cif,", "{"), "needs either 'cif' or 'pdb'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, name, value, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        read_inputs(write(tmp_path / name, value))
    one_sentence(caught.value)


NAMES = st.text("ABCDEFGH", min_size=1, max_size=3)
POLYMER = st.tuples(st.just("protein"), st.text("ARNDCQEGHILKMFPSTWYV", min_size=1, max_size=20))
LIGAND = st.tuples(st.just("ligand"), st.sampled_from(["ATP", "004", "1E3", "NO", "null"]))


@given(st.dictionaries(NAMES, POLYMER | LIGAND, min_size=1, max_size=5))
def test_all_formats_give_the_same_complex(tmp_path_factory, chains):
    folder = tmp_path_factory.mktemp("x")
    af3, boltz, fasta = [], [], ""
    for chain, (kind, text) in chains.items():
        key = "sequence" if kind == "protein" else "ccdCodes"
        af3.append({kind: {"id": chain, key: text if kind == "protein" else [text]}})
        key = "sequence" if kind == "protein" else "ccd"
        boltz.append({kind: {"id": chain, key: text}})
        fasta += f">{chain}|{kind.replace('ligand', 'ccd')}\n{text}\n"
    job = {"name": "x", "dialect": "alphafold3", "version": 1, "sequences": af3}
    read = [
        read_inputs(write(folder / "x.json", job))[0],
        read_inputs(write(folder / "x.yaml", yaml.safe_dump({"sequences": boltz})))[0],
        read_inputs(write(folder / "x.fasta", fasta))[0],
    ]
    plain = [[(e.kind, e.chains, e.sequence) for e in found.entities] for found in read]
    assert plain[0] == plain[1] == plain[2]
    assert read[0].entities == read[1].entities
    assert [e.codes for e in read[2].entities] == [
        tuple(code.upper() for code in e.codes) for e in read[0].entities
    ]


@given(st.binary(max_size=60), st.sampled_from(["x.json", "x.yaml", "x.fasta"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data, name):
    path = tmp_path_factory.mktemp("x") / name
    path.write_bytes(data)
    try:
        read_inputs(path)
    except DataError as error:
        one_sentence(error)
