"""Make the bundled molecules of `make demo`: SMILES of QM9 with gaps of GFN2-xTB.

Needs rdkit, tblite (``pip install "bevatron[molecules,tblite]"``), the list of QM9's SMILES (CC0;
Ramakrishnan et al., Sci. Data 1, 140022, 2014) and a minute on one core::

    OMP_NUM_THREADS=1 python tools/make_molecule_demo_data.py qm9_smiles.csv.gz

Molecules are drawn at random with one seed. Geometries are RDKit's: ETKDG with a fixed seed, then
MMFF94; positions of all atoms are rounded as the heavy ones are written before the label is
computed. The label is the difference of the lowest empty and the highest filled orbital energy of
GFN2-xTB. Each line has a CXSMILES with the positions of the heavy atoms and the gap in eV.
"""

import argparse
import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rdkit import Chem
from rdkit.Chem import AllChem
from tblite.interface import Calculator

OUT = Path(__file__).parents[1] / "src/bevatron/recipes/demo_data/molecules.csv.gz"
SEED = 20260
NUMBER = 500
DECIMALS = 2
BOHR = 0.529177210903
HARTREE = 27.211386245988


def geometry(smiles: str) -> tuple[Any, np.ndarray] | None:
    """Build all atoms of a molecule, rounded, in Å; None where RDKit finds no geometry."""
    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    parameters = AllChem.ETKDGv3()
    parameters.randomSeed = SEED
    if AllChem.EmbedMolecule(molecule, parameters) != 0:
        return None
    if not AllChem.MMFFHasAllMoleculeParams(molecule):
        return None
    if AllChem.MMFFOptimizeMolecule(molecule, maxIters=1000) != 0:
        return None
    return molecule, np.round(molecule.GetConformer().GetPositions(), DECIMALS)


def gap(molecule: Any, positions: np.ndarray) -> float:
    """Compute the gap of the orbitals in eV."""
    numbers = np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()])
    calculator = Calculator("GFN2-xTB", numbers, positions / BOHR)
    calculator.set("verbosity", 0)
    result = calculator.singlepoint()
    energies = result.get("orbital-energies")
    filled = result.get("orbital-occupations") > 1.0
    return float((energies[~filled].min() - energies[filled].max()) * HARTREE)


def rows(smiles: list[str]) -> Iterator[tuple[str, str]]:
    """Yield CXSMILES and gap of the first molecules that can be built."""
    done = 0
    for one in smiles:
        found = geometry(one)
        if found is None:
            continue
        molecule, positions = found
        heavy = positions[: Chem.MolFromSmiles(one).GetNumAtoms()]
        places = ";".join(",".join(f"{x:.{DECIMALS}f}" for x in row) for row in heavy)
        yield f"{one} |({places})|", f"{gap(molecule, positions):.4f}"
        done += 1
        if done == NUMBER:
            return


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("source", type=Path, help="table with a column 'smiles'")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    with gzip.open(arguments.source, "rt", newline="") as file:
        smiles = [row["smiles"] for row in csv.DictReader(file)]
    drawn = np.random.default_rng(SEED).permutation(len(smiles))[: 2 * NUMBER]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("smiles", "gap"))
    writer.writerows(rows([smiles[i] for i in drawn]))
    # No time in the header: the same content is the same file.
    arguments.out.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
