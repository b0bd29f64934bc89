"""Models by name: those in the user's folder of models, and published ones, once downloaded.

``$BEVATRON_MODELS``, or ``~/.cache/bevatron`` without it, holds model folders, which any command
takes by their name. Nothing is ever downloaded.
"""

import os
from pathlib import Path

from bevatron.errors import CheckpointError
from bevatron.files import MODEL_FILE, cache_folder

FOLDER_VARIABLE = "BEVATRON_MODELS"

_MP = "https://github.com/ACEsuit/mace-mp/releases/download/"
_FOUNDATIONS = "https://github.com/ACEsuit/mace-foundations/releases/download/"
_OFF = "https://github.com/ACEsuit/mace-off/raw/main/"

PUBLISHED = {
    "mace-mp-0": f"{_MP}mace_mp_0/2023-12-03-mace-128-L1_epoch-199.model",
    "mace-mp-0-small": f"{_MP}mace_mp_0/2023-12-10-mace-128-L0_energy_epoch-249.model",
    "mace-mp-0-medium": f"{_MP}mace_mp_0/2023-12-03-mace-128-L1_epoch-199.model",
    "mace-mp-0-large": f"{_MP}mace_mp_0/MACE_MPtrj_2022.9.model",
    "mace-mp-0b-small": f"{_MP}mace_mp_0b/mace_agnesi_small.model",
    "mace-mp-0b-medium": f"{_MP}mace_mp_0b/mace_agnesi_medium.model",
    "mace-mp-0b2-small": f"{_MP}mace_mp_0b2/mace-small-density-agnesi-stress.model",
    "mace-mp-0b2-medium": f"{_MP}mace_mp_0b2/mace-medium-density-agnesi-stress.model",
    "mace-mp-0b2-large": f"{_MP}mace_mp_0b2/mace-large-density-agnesi-stress.model",
    "mace-mp-0b3-medium": f"{_MP}mace_mp_0b3/mace-mp-0b3-medium.model",
    "mace-mpa-0-medium": f"{_MP}mace_mpa_0/mace-mpa-0-medium.model",
    "mace-omat-0-small": f"{_MP}mace_omat_0/mace-omat-0-small.model",
    "mace-omat-0-medium": f"{_MP}mace_omat_0/mace-omat-0-medium.model",
    "mace-matpes-pbe-0": f"{_FOUNDATIONS}mace_matpes_0/MACE-matpes-pbe-omat-ft.model",
    "mace-matpes-r2scan-0": f"{_FOUNDATIONS}mace_matpes_0/MACE-matpes-r2scan-omat-ft.model",
    "mace-off23-small": f"{_OFF}mace_off23/MACE-OFF23_small.model",
    "mace-off23-medium": f"{_OFF}mace_off23/MACE-OFF23_medium.model",
    "mace-off23-large": f"{_OFF}mace_off23/MACE-OFF23_large.model",
}
"""Published potentials by name: where their authors offer the file."""


def models_folder() -> Path:
    """Return the folder of the user's models."""
    return Path(os.environ.get(FOLDER_VARIABLE) or cache_folder() / "bevatron").expanduser()


def named_model(path: Path | str) -> Path:
    """Return the folder of a model given by name; a path that exists, or is not a name, as it is.

    Raises CheckpointError for a published model that is not converted yet or has no file; the
    message says what to do.
    """
    path = Path(path)
    folder = models_folder() / path
    if path.exists() or len(path.parts) != 1:
        return path
    if (folder / MODEL_FILE).is_file():
        return folder
    if path.name in PUBLISHED:
        file = published_file(path)
        raise CheckpointError(
            f"{path}: {file} is a pickled model of mace-torch; convert it once with "
            f"`bevatron convert mace-torch {path} --trust`"
        )
    return path


def published_file(path: Path | str) -> Path:
    """Return the downloaded file of a published model; any other name, as it is.

    It is looked for in `models_folder` and where mace-torch keeps its downloads, under its own name
    and under that which mace-torch gives it. Raises CheckpointError if it is not there, naming the
    file and where it is published.
    """
    path = Path(path)
    if path.exists() or str(path) not in PUBLISHED:
        return path
    file = PUBLISHED[str(path)].rpartition("/")[2]
    kept = "".join(letter for letter in file if letter.isalnum() or letter == "_")
    folders = (models_folder(), cache_folder() / "mace")
    for candidate in (folder / name for folder in folders for name in (file, kept)):
        if candidate.is_file():
            return candidate
    raise CheckpointError(
        f"{path}: there is no {file} in {folders[0]} or {folders[1]}; download it from "
        f"{PUBLISHED[str(path)]} into one of them"
    )
