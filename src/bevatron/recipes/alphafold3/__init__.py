"""AlphaFold3: from folders of structures and alignments to trained models and their uses."""

from typing import TYPE_CHECKING

from bevatron.recipes.system import System

if TYPE_CHECKING:
    from bevatron.recipes.alphafold3.run import AlphaFold3Run, build

__all__ = ["SYSTEM", "AlphaFold3Run", "build"]

SYSTEM = System(
    name="alphafold3",
    package=__name__,
    kind="alphafold3",
    summary="structures of complexes of proteins, nucleic acids and ligands",
    samples="complexes",
    config="run:AlphaFold3Run",
    build="run:build",
    commands={
        "prepare": "commands:prepare",
        "evaluate": "commands:evaluate",
        "predict": "commands:predict",
        "convert alphafold3": "commands:convert",
        "convert to-protenix": "commands:convert_to_protenix",
    },
    usage=(
        ("train alphafold3 --data FOLDER", "train from mmCIF files and alignments"),
        ("prepare alphafold3 FOLDER --out STORE", "compute the features of complexes"),
        ("predict RUN FILE OUT", "structures from FASTA, SMILES or AlphaFold3's JSON"),
        ("convert alphafold3 FILE OUT", "weights of Protenix, both ways"),
    ),
    recognises=".proteins.arguments:recognises",
    inspect="inspect",
    demo="demo:run_demo",
    starter="starter.yaml",
    api="api",
)

__getattr__ = SYSTEM.exported
