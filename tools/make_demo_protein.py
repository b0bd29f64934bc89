"""Makes demo_data/peptide.cif.gz and components.cif.gz: a small protein, and its residues.

`python tools/make_demo_protein.py 1l2y.cif`, the entry as the PDB gives it, keeps the heavy atoms
of the first model and what says what they are; the residues come from the chemical component
dictionary in the package biotite.
"""

import gzip
import sys
from pathlib import Path

import gemmi
from biotite.structure.info.ccd import get_from_ccd

OUT = Path(__file__).resolve().parents[1] / "src/bevatron/recipes/demo_data"
KEPT = (
    "_entry.", "_struct.", "_citation.", "_exptl.", "_pdbx_audit_revision_history.", "_entity.",
    "_entity_poly.", "_entity_poly_seq.", "_struct_asym.",
)  # fmt: skip
COMPONENT = ("chem_comp", "chem_comp_atom", "chem_comp_bond")


def main(entry: str) -> None:
    whole = gemmi.cif.read(entry).sole_block()
    reduced = gemmi.cif.Block(whole.name)
    for item in whole:
        tag = item.loop.tags[0] if item.loop else item.pair[0] if item.pair else ""
        if tag.startswith(KEPT):
            reduced.add_item(item)
    atoms = whole.find_mmcif_category("_atom_site.")
    tags = [tag.removeprefix("_atom_site.") for tag in atoms.tags]
    model, element = tags.index("pdbx_PDB_model_num"), tags.index("type_symbol")
    loop = reduced.init_loop("_atom_site.", tags)
    for row in atoms:
        if row[model] == "1" and row[element] != "H":
            loop.add_row(list(row))
    write(OUT / "peptide.cif.gz", [reduced])
    sequence = reduced.find_values("_entity_poly_seq.mon_id")
    write(OUT / "components.cif.gz", [component(code) for code in sorted(set(sequence))])


def component(code: str) -> gemmi.cif.Block:
    block = gemmi.cif.Block(code)
    for name in COMPONENT:
        table = get_from_ccd(name, code)
        loop = block.init_loop(f"_{name}.", list(table))
        columns = [table[column].as_array(str, "?") for column in table]
        for row in zip(*columns, strict=True):
            loop.add_row([value if value == "?" else gemmi.cif.quote(value) for value in row])
    return block


def write(path: Path, blocks: list[gemmi.cif.Block]) -> None:
    document = gemmi.cif.Document()
    for block in blocks:
        document.add_copied_block(block)
    path.write_bytes(gzip.compress(document.as_string().encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
