"""Initial weights of a run: new, or from another run, a model folder or Protenix."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.models.alphafold3 import (
    AlphaFold3,
    AlphaFold3Config,
    from_protenix,
    load_model,
    save_model,
    to_protenix,
)
from bevatron.models.alphafold3.config import PRESETS
from bevatron.models.alphafold3.convert import without_templates
from bevatron.recipes.alphafold3 import SYSTEM
from bevatron.recipes.kinds import newest_model
from bevatron.recipes.start_from import (
    contents,
    named,
    of_preset,
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
        weights = _weights(path)
        if config.templates.num_blocks and without_templates(weights):
            raise CheckpointError(
                "has no blocks for templates, as Protenix v0.5.0; a run of such a model has "
                "model.templates.num_blocks 0"
            )
        return from_protenix(weights, config)


def to_folder(file: Path, out: Path, preset: str) -> str:
    """Write the weights in a checkpoint of Protenix into a model folder.

    Raises CheckpointError as `started_from`, or if ``out`` exists.
    """
    refuse_existing(out)
    config, without = AlphaFold3Config.preset(preset), ""
    with named(str(file)):
        weights = _weights(file)
        if without_templates(weights):
            config = replace(config, templates=replace(config.templates, num_blocks=0))
            without = " without templates"
        with of_preset(preset, PRESETS):
            model = from_protenix(weights, config)
    save_model(model, out)
    return said_of(model, preset + without, out)


def to_protenix_file(model: Path, out: Path) -> str:
    """Write the weights of a run or a model folder as a checkpoint of Protenix."""
    return write_tensors(out, {WEIGHTS: to_protenix(load_model(newest_model(model)))})


def _weights(path: Path) -> Mapping[str, Tensor]:
    found = contents(path)
    return tensors(found.get(WEIGHTS, found))
