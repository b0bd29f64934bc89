"""Weights of the official TensorFlow model, converted by the names and order of its variables.

Names in the official model repeat (four encoders are called ``encoder``), so the order counts:
encoders, the two layers that join their results, block by block, decoder. Widths, heads, kernels,
the feature set and the parts of a block follow from the shapes alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevatron.data.samples import FEATURE_SETS
from bevatron.errors import CheckpointError
from bevatron.models.gpspp.config import PCQM4MV2_MEAN, PCQM4MV2_STD, GPSPlusPlusConfig, Target
from bevatron.models.gpspp.model import GPSPlusPlus

Weights = Mapping[str, npt.ArrayLike] | Iterable[tuple[str, npt.ArrayLike]] | Path | str


@dataclass(frozen=True)
class Piece:
    """One official variable and its destination.

    Attributes
    ----------
    theirs : regular expression of the end of its name
    ours : entry of our state dict
    transposed : whether it is a linear layer's matrix, which Keras stores as [in, out]
    start : first row in our entry; None = the whole entry
    """

    theirs: str
    ours: str
    transposed: bool = False
    start: int | None = None


def from_official(
    weights: Weights, names: Sequence[str] | None = None, dtype: torch.dtype | None = None
) -> GPSPlusPlus:
    """Build the model that an official checkpoint holds.

    Raises CheckpointError if a variable is missing, superfluous or of the wrong shape.

    Parameters
    ----------
    weights
        The variables in the official order (``model.weights``): pairs of name and array, a mapping
        in that order, or the path of an npz file that holds them so.
    names : the variables' names, if ``weights`` are a mapping or file with other keys
    dtype : floating-point type of the model; float32 by default

    Returns
    -------
    GPSPlusPlus
        In evaluation mode, with the labels' mean and spread of PCQM4Mv2.

    Examples
    --------
    ``from_official([(w.name, w.numpy()) for w in official_model.weights])``
    """
    found = _named_arrays(weights, names)
    config = infer_config(found)
    model = GPSPlusPlus(config, dtype or torch.float32)
    state = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    pieces = list(layout(config))
    for (name, array), piece in zip(found, pieces, strict=False):
        _put(state, piece, name, array)
    if len(found) != len(pieces):
        more = found[len(pieces)][0] if len(found) > len(pieces) else pieces[len(found)].theirs
        raise CheckpointError(
            f"the official weights are {len(found)} arrays, expected {len(pieces)} for a model of "
            f"{config.num_layers} blocks; the first that is {_too(found, pieces)} is '{more}'"
        )
    model.load_state_dict(state)
    return model.eval()


def infer_config(found: Sequence[tuple[str, npt.NDArray[Any]]]) -> GPSPlusPlusConfig:
    """Read the hyper-parameters off the variables' names and shapes."""
    index = _Index(found)
    blocks = sorted({m[0] for name, _ in found if (m := re.match(r"gps_layer(_\d+)?/", name))})
    if not blocks:
        raise CheckpointError("the official weights have no variable 'gps_layer/...'")
    atom = tuple(len(array) for array in index.all(r"AtomEncoder/.*embeddings"))
    bond = tuple(len(array) for array in index.all(r"BondEncoder/.*embeddings"))
    sets = [
        made.name
        for made in FEATURE_SETS.values()
        if (made.atom_sizes, made.bond_sizes) == (atom, bond)
    ]
    if not sets:
        raise CheckpointError(f"no feature set has vocabularies of {atom} for atoms, {bond} bonds")
    attention = index.has(r"biased_self_attention")
    mpnn = index.has(r"interaction_network")
    paths = index.one(r"ShortestPathDistanceEmbedding/embeddings")
    walks = index.all(r"base_encoder/encoder/encoder_1/W")
    first = index.one(r"gps_layer/.*node/node_1/W") if mpnn else None
    ffn = index.has(r"ffn_layer")
    return GPSPlusPlusConfig(
        feature_set=sets[0],
        num_layers=len(blocks),
        node_width=index.one(r"concat_features/dense/kernel").shape[1],
        edge_width=index.one(r"concat_features/dense_1/kernel").shape[1],
        global_width=index.one(r"base_encoder/embedding_\d+/embeddings").shape[1],
        num_heads=paths.shape[1],
        ffn_width=index.one(r"gps_layer/ffn_layer/dense_\d+/kernel").shape[1] if ffn else 1,
        expansion=_ratio(index.one(r"node_encoder/node_encoder_2/W")),
        embedding_width=index.one(r"CentralityEmbedding/embeddings").shape[1],
        encoder_width=index.one(r"base_encoder/dense/W").shape[1],
        encoder_expansion=_ratio(index.all(r"base_encoder/encoder/encoder_2/W")[0]),
        decoder_width=index.one(r"main_decoder_1/W").shape[1],
        mpnn=mpnn,
        attention=attention,
        ffn=ffn,
        num_laplacian=len(walks[0]),
        num_walks=len(walks[2]),
        unused_bias=not attention,
        num_kernels=len(index.one(r"gaussian_kernel_encoder/gaussian_mean")),
        max_path=len(paths) - 1,
        max_degree=len(index.one(r"CentralityEmbedding/embeddings")) - 2,
        noisy_nodes=index.has(r"NNode_aux"),
        noisy_edges=index.has(r"NEdge_aux"),
        sender_aggregation=first is None or _both_ways(index, first),
        targets=(Target("gap", mean=PCQM4MV2_MEAN, std=PCQM4MV2_STD, unit="eV"),),
    )


def layout(config: GPSPlusPlusConfig) -> Iterator[Piece]:
    """List the official variables of a model in their order."""
    yield from _encoder_pieces(config)
    for layer in range(config.num_layers):
        yield from _block_pieces(config, layer)
    yield from _mlp("decoder.mlp", "main_decoder")
    for name, ours, present in (
        ("NNode_aux", "noise.nodes", config.noisy_nodes),
        ("NEdge_aux", "noise.edges", config.noisy_edges),
    ):
        if present:
            yield from _linear(ours, name)


def _encoder_pieces(config: GPSPlusPlusConfig) -> Iterator[Piece]:
    features = config.features
    yield from _tables("encoders.atoms", "AtomEncoder", features.atom_sizes)
    yield from _mlp("encoders.atom_mlp", "node_encoder")
    yield from _tables("encoders.bonds", "BondEncoder", features.bond_sizes)
    yield from _mlp("encoders.bond_mlp", "edge_encoder")
    for ours in ("values", "vectors", "walks"):
        yield from _mlp(f"encoders.{ours}", "encoder", input_norm=True)
    path = r"ShortestPathDistanceEmbedding/embeddings"
    yield Piece(path, "encoders.bias.paths.weight", start=0)
    yield from _kernels("encoders.pair_kernels")
    yield from _mlp("encoders.bias.distances", "MLP", norm=False)
    yield Piece(r"dense/W", "encoders.sums.weight", transposed=True)
    yield from _kernels("encoders.bond_kernels")
    yield from _mlp("encoders.bond_lengths", "encoder", input_norm=True)
    yield Piece(r"CentralityEmbedding/embeddings", "encoders.degrees.weight")
    yield Piece(r"embedding_\d+/embeddings", "encoders.global_")
    yield from _linear("encoders.nodes", r"concat_features/dense")
    yield from _linear("encoders.edges", r"concat_features/dense_1")


def _block_pieces(config: GPSPlusPlusConfig, layer: int) -> Iterator[Piece]:
    block, width = f"blocks.{layer}", config.node_width
    if config.mpnn:
        parts = ["node", "edge", *(["global"] if config.updates_globals(layer) else [])]
        for part in parts:
            yield from _mlp(f"{block}.mpnn.{part}{'_' * (part == 'global')}", part)
        yield from _norm(f"{block}.mpnn_norm", r"ln(_\d+)?")
    if config.attention:
        attention = r"biased_self_attention_layer(_\d+)?/dense_\d+"
        for place in range(3):
            start = place * width
            yield Piece(f"{attention}/kernel", f"{block}.attention.qkv.weight", True, start)
            yield Piece(f"{attention}/bias", f"{block}.attention.qkv.bias", start=start)
        yield from _linear(f"{block}.attention.out", attention)
        yield from _norm(f"{block}.attention_norm", r"ln(_\d+)?")
    if config.ffn:
        for part in ("first", "second"):
            yield from _linear(f"{block}.ffn.{part}", r"ffn_layer(_\d+)?/dense_\d+")
        yield from _norm(f"{block}.ffn_norm", r"ln(_\d+)?")


def _tables(ours: str, theirs: str, sizes: tuple[int, ...]) -> Iterator[Piece]:
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    for start in starts:
        yield Piece(rf"{theirs}/embedding(_\d+)?/embeddings", f"{ours}.weight", start=start)


def _mlp(ours: str, theirs: str, *, norm: bool = True, input_norm: bool = False) -> Iterator[Piece]:
    for number, part in enumerate(("first", "second"), 1):
        yield from _linear(f"{ours}.{part}", rf"{theirs}/{theirs}_{number}")
    if norm:
        yield from _norm(f"{ours}.norm", rf"{theirs}/layer_norm(_\d+)?")
    if input_norm:
        yield from _norm(f"{ours}.input_norm", rf"{theirs}/layer_norm(_\d+)?")


def _linear(ours: str, theirs: str) -> Iterator[Piece]:
    yield Piece(rf"{theirs}/(W|kernel)", f"{ours}.weight", transposed=True)
    yield Piece(rf"{theirs}/bias", f"{ours}.bias")


def _norm(ours: str, theirs: str) -> Iterator[Piece]:
    yield Piece(rf"{theirs}/gamma", f"{ours}.weight")
    yield Piece(rf"{theirs}/beta", f"{ours}.bias")


def _kernels(ours: str) -> Iterator[Piece]:
    for name in ("mean", "std"):
        yield Piece(rf"gaussian_kernel_encoder(_\d+)?/gaussian_{name}", f"{ours}.{name}")


def _put(state: dict[str, Tensor], piece: Piece, name: str, array: npt.NDArray[Any]) -> None:
    if not re.search(rf"(^|/){piece.theirs}(:\d+)?$", name):
        raise CheckpointError(
            f"the official weights have '{name}' where '{piece.theirs}' should come"
        )
    values = torch.from_numpy(np.array(array.T if piece.transposed else array, order="C"))
    target = state[piece.ours]
    if piece.start is not None:
        target = target[piece.start : piece.start + len(values)]
    # The official model stores the global vector as a table of one row.
    if piece.ours == "encoders.global_":
        values = values.reshape(-1)
    if values.shape != target.shape:
        raise CheckpointError(
            f"the official '{name}' has shape {array.shape}, the model's '{piece.ours}' "
            f"{tuple(target.shape)}"
        )
    target.copy_(values)


def _named_arrays(
    weights: Weights, names: Sequence[str] | None
) -> list[tuple[str, npt.NDArray[Any]]]:
    if isinstance(weights, Path | str):
        try:
            with np.load(weights, allow_pickle=False) as file:
                pairs: list[Any] = [(name, file[name]) for name in file.files]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{weights}: cannot be read ({error})") from None
    else:
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
    if names is not None:
        if len(names) != len(pairs):
            raise CheckpointError(
                f"{len(names)} names were given for {len(pairs)} official weights"
            )
        pairs = [(name, array) for name, (_, array) in zip(names, pairs, strict=True)]
    return [(name, np.asarray(array)) for name, array in pairs]


class _Index:
    """Looks up variables by a part of their names."""

    def __init__(self, found: Sequence[tuple[str, npt.NDArray[Any]]]) -> None:
        self.found = found

    def all(self, pattern: str) -> list[npt.NDArray[Any]]:
        arrays = [array for name, array in self.found if re.search(pattern, name)]
        if not arrays:
            raise CheckpointError(f"the official weights have no variable '{pattern}'")
        return arrays

    def one(self, pattern: str) -> npt.NDArray[Any]:
        return self.all(pattern)[0]

    def has(self, pattern: str) -> bool:
        return any(re.search(pattern, name) for name, _ in self.found)


def _ratio(second: npt.NDArray[Any]) -> int:
    """Return hidden over output features of an MLP's second layer."""
    return int(second.shape[0] // second.shape[1])


def _both_ways(index: _Index, first: npt.NDArray[Any]) -> bool:
    """Whether the first layer of a node MLP reads the sums of both directions."""
    node = index.one(r"concat_features/dense/kernel").shape[1]
    edge = index.one(r"concat_features/dense_1/kernel").shape[1]
    return len(first) >= int(2 * (edge + node) + node)


def _too(found: Sequence[Any], pieces: Sequence[Any]) -> str:
    return "too many" if len(found) > len(pieces) else "missing"
