"""Initial weights of a run: new, or from another run, a model folder or Protenix."""

from pathlib import Path

from bevatron.models.alphafold3 import (
    AlphaFold3,
    AlphaFold3Config,
    from_protenix,
    load_model,
    save_model,
    to_protenix,
)
from bevatron.recipes.alphafold3 import SYSTEM
from bevatron.recipes.kinds import newest_model
from bevatron.recipes.start_from import (
    contents,
    named,
    refuse_existing,
    said_of,
    tensors,
    with_weights_of,
    write_tensors,
)

WEIGHTS = "model"
"""Key of Protenix's checkpoints that holds the weights."""


def started_from(path: Path, config: AlphaFold3Config) -> AlphaFold3:
    """Build a model with the weights of a run, a model folder or a checkpoint of Protenix.

    Raises CheckpointError if it cannot be read or is of a model of other sizes.
    """
    if path.is_dir():
        with named("start_from"):
            return with_weights_of(path, AlphaFold3(config), SYSTEM)
    with named(f"start_from: {path}"):
        return _in_file(path, config)


def to_folder(file: Path, out: Path, preset: str) -> str:
    """Write the weights in a checkpoint of Protenix into a model folder.

    Raises CheckpointError as `started_from`, or if ``out`` exists.
    """
    refuse_existing(out)
    config = AlphaFold3Config.preset(preset)
    with named(str(file)):
        model = _in_file(file, config)
    save_model(model, out)
    return said_of(model, preset, out)


def to_protenix_file(model: Path, out: Path) -> str:
    """Write the weights of a run or a model folder as a checkpoint of Protenix."""
    return write_tensors(out, {WEIGHTS: to_protenix(load_model(newest_model(model)))})


def _in_file(path: Path, config: AlphaFold3Config) -> AlphaFold3:
    found = contents(path)
    return from_protenix(tensors(found.get(WEIGHTS, found)), config)
