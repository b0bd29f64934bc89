"""AlphaFold2: from folders of structures and alignments to trained models and their uses."""

from typing import TYPE_CHECKING

from bevatron.recipes.system import System

if TYPE_CHECKING:
    from bevatron.recipes.alphafold2.run import AlphaFold2Run, build

__all__ = ["SYSTEM", "AlphaFold2Run", "build"]

SYSTEM = System(
    name="alphafold2",
    package=__name__,
    kind="alphafold2",
    summary="structures of protein chains",
    samples="chains",
    config="run:AlphaFold2Run",
    build="run:build",
    commands={
        "prepare": "commands:prepare",
        "evaluate": "commands:evaluate",
        "predict": "commands:predict",
        "convert alphafold2": "commands:convert",
        "convert to-openfold": "commands:convert_to_openfold",
        "convert to-mlperf": "commands:convert_to_mlperf",
        "convert to-deepmind": "commands:convert_to_deepmind",
    },
    usage=(
        ("train alphafold2 --data FOLDER", "train from mmCIF files and alignments"),
        ("prepare alphafold2 FOLDER --out STORE", "compute the features of protein chains"),
        ("predict RUN FILE OUT", "structures of chains from FASTA and alignments"),
        ("convert alphafold2 FILE OUT", "weights of OpenFold and DeepMind, both ways"),
    ),
    recognises=".proteins.arguments:recognises",
    inspect="inspect",
    starter="starter.yaml",
    api="api",
)

__getattr__ = SYSTEM.exported
