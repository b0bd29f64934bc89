"""MACE: from structures to a trained interatomic potential and its uses."""

from typing import TYPE_CHECKING

from bevatron.recipes.system import System

if TYPE_CHECKING:
    from bevatron.recipes.mace.run import MaceRun, build

__all__ = ["SYSTEM", "MaceRun", "build"]

SYSTEM = System(
    name="mace",
    package=__name__,
    kind="mace",
    summary="interatomic potentials, trained on structures",
    samples="structures",
    config="run:MaceRun",
    build="run:build",
    commands={
        "prepare": "commands:prepare",
        "evaluate": "commands:evaluate",
        "predict": "commands:predict",
        "relax": "commands:relax",
        "convert mace-torch": "commands:convert_from_mace_torch",
        "convert to-mace-torch": "commands:convert_to_mace_torch",
    },
    usage=(
        ("train mace --data FILE --output RUN", "train from files, a store or a YAML file"),
        ("prepare FILE... --out STORE --cutoff 5", "check labels, find neighbours"),
        ("predict RUN FILE OUT", "energies, forces and stress of structures"),
        ("relax RUN FILE OUT", "many geometries at once to their minima"),
        ("convert mace-torch FILE OUT", "checkpoints of mace-torch, both ways"),
    ),
    inspect="inspect",
    starter="starter.yaml",
    api="api",
    demo="demo:run_demo",
)

__getattr__ = SYSTEM.exported
