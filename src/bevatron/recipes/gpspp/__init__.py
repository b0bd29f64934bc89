"""GPS++: from molecules to trained property models and their uses."""

from typing import TYPE_CHECKING

from bevatron.recipes.system import System

if TYPE_CHECKING:
    from bevatron.recipes.gpspp.run import GpsppRun, build

__all__ = ["SYSTEM", "GpsppRun", "build"]

SYSTEM = System(
    name="gpspp",
    package=__name__,
    kind="gpspp",
    summary="properties of molecules, from SMILES with or without 3D structures",
    samples="molecules",
    config="run:GpsppRun",
    build="run:build",
    commands={
        "prepare": "commands:prepare",
        "evaluate": "commands:evaluate",
        "predict": "commands:predict",
        "embed": "commands:embed",
    },
    usage=(
        ("train gpspp --data FILE --output RUN", "train from SMILES, SDF, a store or a YAML file"),
        ("prepare FILE.csv --out STORE", "compute the features of molecules"),
        ("predict RUN FILE OUT [RUN...]", "properties, by one model or an ensemble"),
        ("embed RUN FILE OUT.npz", "embeddings of molecules and atoms"),
    ),
    recognises="commands:recognises",
    inspect="inspect",
    starter="starter.yaml",
    api="api",
    demo="demo:run_demo",
)

__getattr__ = SYSTEM.exported
