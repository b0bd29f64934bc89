"""GPS++: message passing and biased attention for properties of molecules.

Masters et al., "GPS++: Reviving the Art of Message Passing for Molecular Property Prediction"
(arXiv 2302.02947; report 2212.02229), as its official code computes it. From bottom to top:
`layers` (the block), `encoders` (first nodes, edges, globals, bias), `heads`, and here the whole.
Nodes, directed edges and one global vector per molecule go through blocks in which message passing
and attention see the same input; the sum over the last nodes gives the properties. Molecules are
concatenated, without padding, and do not interact.

Legend: N atoms, E directed edges (2k and 2k + 1 are the two directions of a bond), G molecules, P
pairs of atoms of one molecule, H heads, T targets.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor, nn

from bevatron.data.samples import MoleculeBatch
from bevatron.errors import ConfigError, DataError
from bevatron.kernels.molecule.linear import rounded_together
from bevatron.models.gpspp.config import GPSPlusPlusConfig
from bevatron.models.gpspp.corruption import Inputs, observe
from bevatron.models.gpspp.encoders import Encoders
from bevatron.models.gpspp.graphs import Drops, Graphs, draw_drops
from bevatron.models.gpspp.heads import Decoder, DenoisingHead, NoiseHeads
from bevatron.models.gpspp.layers import Block, Stream

OUTPUTS = (
    "prediction",
    "raw",
    "graph_embedding",
    "node_embedding",
    "edge_embedding",
    "node_logits",
    "edge_logits",
    "directions",
)
"""Outputs of `GPSPlusPlus.forward`."""


class GPSPlusPlus(nn.Module):
    """The model.

    Parameters
    ----------
    config : hyper-parameters
    dtype : floating-point type; torch's default if not given

    Examples
    --------
    >>> model = GPSPlusPlus(GPSPlusPlusConfig.preset("gpspp-4"))
    >>> sum(parameter.numel() for parameter in model.parameters())
    11538517
    """

    def __init__(self, config: GPSPlusPlusConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoders = Encoders(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.decoder = Decoder(config)
        self.noise = NoiseHeads(config)
        self.denoising = DenoisingHead(config) if config.denoising else None
        self.to(dtype or torch.get_default_dtype())

    def forward(
        self,
        batch: MoleculeBatch,
        *,
        inputs: Inputs | None = None,
        compute: Collection[str] = ("prediction",),
    ) -> dict[str, Tensor]:
        """Compute properties and other outputs.

        Raises DataError if the batch has another feature set.

        Parameters
        ----------
        batch : molecules with the model's feature set
        inputs : the visible part of them, see `corruption`; by default everything, in 2D
        compute : any of `OUTPUTS`

        Returns
        -------
        dict
            prediction [G, T]: numbers in the target's unit, the probability of a binary target,
            the class of one with several; raw [G, W], their origin: normalised numbers
            and logits; graph_embedding [G, C], the sum of the last nodes; node_embedding [N, C],
            edge_embedding [E, Ce]; node_logits and edge_logits of noisy nodes and edges;
            directions [N, 3] of the noise on positions.
        """
        _check_outputs(compute, self.config)
        self._check_columns(batch)
        if not batch.checked and batch.atom_features.device.type == "cpu":
            self.check(batch)
        inputs = observe(batch) if inputs is None else inputs
        with rounded_together(self.parameters()):
            outputs = self._compute(batch, inputs, Graphs.of(batch), compute)
        return {name: outputs[name] for name in compute}

    def _compute(
        self, batch: MoleculeBatch, inputs: Inputs, graphs: Graphs, compute: Collection[str]
    ) -> dict[str, Tensor]:
        """Run encoders, blocks and heads; may return more than requested."""
        nodes, edges, globals_, bias = self.encoders(batch, inputs, graphs)
        drops = draw_drops(self.config, graphs) if self.training else [Drops()] * len(self.blocks)
        edge_stream = None if edges is None else Stream(edges, edges)
        stream = None if globals_ is None else Stream(globals_, globals_)
        for block, drop in zip(self.blocks, drops, strict=True):
            nodes, edge_stream, stream, bias = block(nodes, edge_stream, stream, bias, graphs, drop)
        edges = None if edge_stream is None else edge_stream.wide
        globals_ = None if stream is None else stream.wide
        outputs = {"node_embedding": nodes, **self.decoder(nodes, globals_, graphs)}
        if edges is not None:
            outputs["edge_embedding"] = edges
        if {"node_logits", "edge_logits"} & set(compute):
            outputs.update(self.noise(nodes, edges))
        if self.denoising is not None and "directions" in compute:
            outputs["directions"] = self.denoising(nodes, bias, batch, inputs, graphs)
        return outputs

    def check(self, batch: MoleculeBatch) -> None:
        """Refuse a batch on the CPU whose features are not those of the model.

        Raises DataError naming the feature.
        """
        self._check_columns(batch)
        features = self.config.features
        for names, sizes, values in (
            (features.atom, features.atom_sizes, batch.atom_features),
            (features.bond, features.bond_sizes, batch.bond_features),
        ):
            if not len(values):
                continue
            # numpy, because this runs every step and torch takes four times as long along columns.
            wrong = (values.numpy() < 0) | (values.numpy() >= sizes)
            if wrong.any():
                row, column = np.argwhere(wrong)[0].tolist()
                raise DataError(
                    f"the feature '{names[column]}' has the value {values[row, column]}, expected "
                    f"0 to {sizes[column] - 1}; prepare the molecules with feature set "
                    f"'{features.name}'"
                )

    def _check_columns(self, batch: MoleculeBatch) -> None:
        features = self.config.features
        found = batch.atom_features.shape[1], batch.bond_features.shape[1]
        if found != (len(features.atom), len(features.bond)):
            raise DataError(
                f"the molecules have {found[0]} features per atom and {found[1]} per bond, the "
                f"model's set '{features.name}' has {len(features.atom)} and "
                f"{len(features.bond)}; prepare them with that set"
            )


def _check_outputs(compute: Collection[str], config: GPSPlusPlusConfig) -> None:
    unknown = [name for name in compute if name not in OUTPUTS]
    if isinstance(compute, str) or unknown:
        raise ConfigError(
            f"compute: there is no {unknown or [compute]} (known: {', '.join(OUTPUTS)})"
        )
    switches = {
        "edge_embedding": ("edges", config.edges),
        "node_logits": ("noisy_nodes", config.noisy_nodes),
        "edge_logits": ("noisy_edges", config.noisy_edges),
        "directions": ("denoising", config.denoising),
    }
    for name in compute:
        switch, present = switches.get(name, ("", True))
        if not present:
            raise ConfigError(f"compute: '{name}' needs a model with {switch}")
