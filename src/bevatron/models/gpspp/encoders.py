"""Maps chemical features, encodings and positions to the first nodes, edges, globals and bias."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bevatron.data.samples import UNREACHABLE, MoleculeBatch
from bevatron.kernels import gaussian_basis, linear, norm_gelu, segment_sum
from bevatron.models.gpspp.config import MEAN_DISTANCE, GPSPlusPlusConfig
from bevatron.models.gpspp.corruption import Inputs
from bevatron.models.gpspp.graphs import Graphs
from bevatron.models.gpspp.layers import MLP, dense

KERNEL_SCALE = 0.1
"""Factor of the Gaussian kernels; like `KERNEL_EPSILON` from the official configuration."""

KERNEL_EPSILON = 0.01
"""Minimum width of a Gaussian kernel."""


class Tables(nn.Module):
    """Sum of one embedding per feature, all in one table.

    Rows are selected by a matmul with zeros and ones, whose backward pass is a matmul too: no
    atomics, so results repeat bit for bit.

    Parameters
    ----------
    sizes : values of each feature
    width : width of an embedding
    """

    def __init__(self, sizes: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(sizes), width))
        # Keras initialises tables like this.
        nn.init.uniform_(self.weight, -0.05, 0.05)
        starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
        self.register_buffer("starts", starts, persistent=False)
        self.starts: Tensor

    def forward(self, features: Int[Tensor, "M F"]) -> Float[Tensor, "M W"]:
        """Look features up."""
        table = padded(self.weight)
        return F.linear(one_hot(features + self.starts, len(table), self), table.t())

    def transposed(
        self, index: Int[Tensor, " P"], scale: Tensor | None = None
    ) -> Float[Tensor, "W P"]:
        """Look one feature up, each embedding a column, times a factor."""
        table = padded(self.weight)
        return torch.mm(table.t(), one_hot(index[:, None], len(table), self, scale).t())


def padded(weight: Float[Tensor, "R *C"]) -> Float[Tensor, "S *C"]:
    """Append rows of zeros up to a multiple of eight.

    cuBLAS needs rows of a multiple of 16 bytes for its fast matmuls.
    """
    missing = -len(weight) % 8
    return F.pad(weight, (0, 0) * (weight.ndim - 1) + (0, missing)) if missing else weight


def one_hot(
    index: Int[Tensor, "M F"], width: int, module: nn.Module, scale: Tensor | None = None
) -> Float[Tensor, "M W"]:
    """Set the selected entries of each row to one, or to the row's factor."""
    dtype = compute_dtype(next(module.parameters()))
    zeros = torch.zeros(len(index), width, dtype=dtype, device=index.device)
    if scale is None:
        return zeros.scatter_(1, index, 1.0)
    return zeros.scatter_(1, index, scale.to(dtype)[:, None])


def compute_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of matmuls."""
    kind = like.device.type
    if torch.is_autocast_enabled(kind) and like.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return like.dtype


class GaussianKernels(nn.Module):
    r"""Gaussian kernels of a distance, with learned centres and widths.

    .. math::

        \psi_k(r) = \frac{0.1}{\sqrt{2\pi} s_k} \exp\Big(-\frac12
        \Big(\frac{r - \mu_k}{s_k}\Big)^2\Big), \qquad s_k = |\sigma_k| + 0.01

    (arXiv 2302.02947, eq. 31, whose minus sign is a misprint; factor and offset as in the official
    configuration.) Computed in float32 at least.
    """

    def __init__(self, num_kernels: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.empty(num_kernels).uniform_(0.0, 1.5))
        self.std = nn.Parameter(torch.empty(num_kernels).uniform_(0.0, 1.5))

    def forward(self, distances: Float[Tensor, " P"]) -> Float[Tensor, "P K"]:
        """Evaluate all kernels, in the dtype of matmuls."""
        return gaussian_basis(
            distances,
            self.mean,
            self.std,
            scale=KERNEL_SCALE,
            epsilon=KERNEL_EPSILON,
            dtype=compute_dtype(self.mean),
        )


class PairBias(nn.Module):
    """Bias of attention: a table of shortest paths plus a network of the distance's kernels."""

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        self.max_path = config.max_path
        heads, kernels = config.num_heads, config.num_kernels
        self.paths = Tables((config.max_path + 1,), heads) if config.shortest_paths else None
        network = MLP(kernels, kernels, heads, norm=False) if config.distance_bias else None
        self.distances = network

    def forward(
        self, batch: MoleculeBatch, psi: Tensor | None, keep_2d: Tensor | None, keep_3d: Tensor
    ) -> Float[Tensor, "P H"]:
        """Compute the bias, each head contiguous.

        Parameters
        ----------
        batch : molecules
        psi : kernels of the distances of all pairs; None = no molecule is seen in 3D
        keep_2d, keep_3d : factor 1 or 0 for every pair; None = 1
        """
        parts: list[Tensor] = []
        if self.paths is not None:
            steps = batch.shortest_paths.long()
            index = torch.where(steps == UNREACHABLE, 0, (steps + 1).clamp(max=self.max_path))
            parts.append(self.paths.transposed(index, keep_2d))
        if self.distances is not None and psi is not None:
            first, second = self.distances.first, self.distances.second
            hidden = norm_gelu(linear(psi, first.weight), None, None, linear_bias=first.bias)
            found = torch.mm(second.weight, hidden.t()) + second.bias[:, None].to(hidden.dtype)
            parts.append(found * keep_3d.to(found.dtype))
        if not parts:
            shape = (len(batch.shortest_paths), 0)
            return batch.random_walk.new_zeros(shape)
        return sum(parts[1:], parts[0]).t()


class Encoders(nn.Module):
    """All inputs of a model (arXiv 2302.02947, section 4; sizes and order of the official code).

    A masked feature is zero after encoding.
    """

    def __init__(self, config: GPSPlusPlusConfig) -> None:
        super().__init__()
        self.config = config
        features, embedding = config.features, config.embedding_width
        node, edge, width = config.node_width, config.edge_width, config.encoder_width
        self.rate = config.dropout.encoder

        def encoder(width_in: int) -> MLP:
            hidden = config.encoder_expansion * width
            norm, activation = config.encoder_norm, "relu" if config.encoder_norm else "gelu"
            return MLP(width_in, hidden, width, activation, input_norm=norm)  # type: ignore[arg-type]

        self.atoms = Tables(features.atom_sizes, embedding)
        self.atom_mlp = MLP(embedding, config.expansion * node, node)
        self.degrees = Tables((config.max_degree + 2,), embedding) if config.degree else None
        self.values = encoder(config.num_laplacian) if config.laplacian else None
        self.vectors = encoder(config.num_laplacian) if config.laplacian else None
        self.walks = encoder(config.num_walks) if config.random_walk else None
        bias = config.has_bias or (config.unused_bias and not config.attention)
        self.bias = PairBias(config) if bias else None
        distances = config.distance_sum or (bias and config.distance_bias)
        self.pair_kernels = GaussianKernels(config.num_kernels) if distances else None
        summed = config.distance_sum
        self.sums = dense(config.num_kernels, width, bias=False) if summed else None
        extra = 2 * config.laplacian + config.random_walk + config.distance_sum
        inputs = node + width * extra + embedding * config.degree
        self.nodes = dense(inputs, node)
        self.bonds: Tables | None = None
        self.bond_kernels: GaussianKernels | None = None
        self.bond_lengths: MLP | None = None
        if config.edges:
            self.bonds = Tables(features.bond_sizes, embedding)
            self.bond_mlp = MLP(embedding, config.expansion * edge, edge)
            if config.bond_lengths:
                self.bond_kernels = GaussianKernels(config.num_kernels)
                self.bond_lengths = encoder(config.num_kernels)
            self.edges = dense(edge + width * config.bond_lengths, edge)
        start = torch.empty(config.global_width).uniform_(-0.05, 0.05)
        self.global_ = nn.Parameter(start) if config.globals_ else None

    def forward(
        self, batch: MoleculeBatch, inputs: Inputs, graphs: Graphs
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Compute the first nodes [N, C], edges, globals and the bias [P, H]."""
        pairs, psi = None, None
        if inputs.keep_3d is not None and self.pair_kernels is not None:
            pairs = batch.pairs()
            first, second, _ = pairs
            lengths = torch.linalg.vector_norm(
                inputs.positions[second] - inputs.positions[first], dim=-1
            )
            psi = self.pair_kernels(lengths / (2 * MEAN_DISTANCE))
        bias = None
        if self.bias is not None and self.config.has_bias:
            bias = self._bias(self.bias, batch, inputs, pairs, psi)
        parts = self._node_parts(batch, inputs, graphs, psi)
        nodes = linear(torch.cat(parts, 1), self.nodes.weight, self.nodes.bias)
        edges = self._edges(inputs, graphs) if self.bonds is not None else None
        wide = self.nodes.weight.dtype
        globals_ = None
        if self.global_ is not None:
            globals_ = self.global_.to(wide).expand(batch.num_graphs, -1)
        return nodes, None if edges is None else edges.to(wide), globals_, bias

    def _bias(
        self,
        module: PairBias,
        batch: MoleculeBatch,
        inputs: Inputs,
        pairs: tuple[Tensor, Tensor, Tensor] | None,
        psi: Tensor | None,
    ) -> Tensor | None:
        """Compute the bias; None if the inputs have nothing to add."""
        if psi is None and module.paths is None:
            return None
        if pairs is None:
            return module(batch, None, None, torch.ones(()))  # type: ignore[no-any-return]
        keep_2d = None if inputs.keep_2d is None else inputs.keep_2d[pairs[2]]
        assert inputs.keep_3d is not None
        return module(batch, psi, keep_2d, inputs.keep_3d[pairs[2]])  # type: ignore[no-any-return]

    def _node_parts(
        self, batch: MoleculeBatch, inputs: Inputs, graphs: Graphs, psi: Tensor | None
    ) -> list[Tensor]:
        """Encode the features of atoms, in the alphabetical order of the official names."""
        atoms = self.atom_mlp(self.atoms(inputs.atom_features))
        parts = []
        if self.degrees is not None:
            degree = (graphs.degree + 1).clamp(max=self.config.max_degree + 1)
            parts.append(self.degrees(degree[:, None]))
        if self.sums is not None:
            if psi is None or inputs.keep_3d is None:
                parts.append(atoms.new_zeros(len(atoms), self.config.encoder_width))
            else:
                sums = self.sums(segment_sum(psi, pair_rows(graphs)))
                parts.append(sums * inputs.keep_3d.to(sums.dtype)[graphs.graph][:, None])
        if self.values is not None and self.vectors is not None:
            count = self.config.num_laplacian
            values = spread(self.values(batch.laplacian_values[:, :count]), graphs)
            parts.append(self._dropped(values))
            parts.append(self._dropped(self.vectors(inputs.laplacian_vectors[:, :count])))
        parts.append(atoms)
        if self.walks is not None:
            walks = self.walks(batch.random_walk[:, : self.config.num_walks])
            parts.append(self._dropped(walks))
        return parts

    def _edges(self, inputs: Inputs, graphs: Graphs) -> Tensor:
        assert self.bonds is not None
        parts = [self.bond_mlp(self.bonds(inputs.bond_features))]
        if self.bond_lengths is not None and self.bond_kernels is not None:
            if inputs.keep_3d is None:
                parts.append(parts[0].new_zeros(len(parts[0]), self.config.encoder_width))
            else:
                ends = (
                    inputs.positions[graphs.bonds.senders],
                    inputs.positions[graphs.bonds.receivers],
                )
                lengths = torch.linalg.vector_norm(ends[1] - ends[0], dim=-1)
                found = self._dropped(self.bond_lengths(self.bond_kernels(lengths)))
                kept = inputs.keep_3d.to(found.dtype)[graphs.edge_graph]
                parts.append(found * kept[:, None])
        return linear(torch.cat(parts, 1), self.edges.weight, self.edges.bias)

    def _dropped(self, rows: Tensor) -> Tensor:
        """Drop whole rows in training."""
        if not self.training or self.rate == 0.0:
            return rows
        kept = torch.rand(len(rows), 1, device=rows.device) >= self.rate
        return rows * (kept / (1.0 - self.rate)).to(rows.dtype)


def spread(rows: Float[Tensor, "G C"], graphs: Graphs) -> Float[Tensor, "N C"]:
    """Broadcast each molecule's row to its atoms; the gradient is a sum in a fixed order."""
    found: Tensor = _Spread.apply(rows, graphs.graph, graphs.graph_ptr)
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, graph: Tensor, ptr: Tensor) -> Tensor:
        ctx.save_for_backward(ptr)
        return rows.index_select(0, graph)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ptr,) = ctx.saved_tensors
        return segment_sum(gradient.contiguous(), ptr), None, None


def pair_rows(graphs: Graphs) -> Int[Tensor, " _"]:
    """Return the offsets of each atom's pairs with all atoms of its molecule, [N + 1].

    Atoms of a molecule without pairs, such as padding, have none.
    """
    graph, begin, pairs = graphs.graph, graphs.graph_ptr[:-1], graphs.pair_ptr
    place = torch.arange(len(graph), device=graph.device) - begin[graph]
    size = graphs.graph_ptr.diff()[graph]
    starts = torch.minimum(pairs[graph] + place * size, pairs[graph + 1])
    return torch.cat([starts, pairs[-1:]])
