"""A graph partitioned over many processes, as a stack of layers sees it."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr
from bevatron.parallel.graph_partition import build, planner
from bevatron.parallel.graph_partition.grid import Grid
from bevatron.parallel.graph_partition.one_group import sum_of_shares
from bevatron.parallel.graph_partition.rows import Rows
from bevatron.parallel.graph_partition.scheme import Scheme, pad_rows
from bevatron.parallel.graph_partition.sources import EdgeSource
from bevatron.parallel.graph_partition.wire import Wire
from bevatron.parallel.groups import Group, Pending
from bevatron.parallel.mesh import Mesh


class DistributedGraph:
    """A graph partitioned over the ranks; made by `build`.

    Attributes
    ----------
    num_vertices : vertices of the whole graph
    scheme : the partitioning scheme, with this rank's block of the matrix
    plan : why this scheme was chosen; None if the caller chose
    mesh : the processes
    generator
        Draws the seeds of dropout, in the same state on every rank: masks agree without a message.
        A training program that resumes exactly saves and restores its state.
    """

    def __init__(
        self,
        num_vertices: int,
        scheme: Scheme,
        mesh: Mesh,
        plan: planner.Plan | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.num_vertices, self.scheme, self.mesh, self.plan = num_vertices, scheme, mesh, plan
        self.generator = generator or torch.Generator().manual_seed(0)

    @classmethod
    def build(
        cls,
        source: EdgeSource,
        mesh: Mesh | None = None,
        *,
        scheme: str = "auto",
        grid: Grid | None = None,
        attention: str = "gat",
        heads: int = 1,
        channels: int = 64,
        num_entries: int | None = None,
        machine: planner.Machine | None = None,
        chunks: int | None = None,
        bfloat16_wire: bool = False,
        regather: bool = False,
        seed: int = 0,
        generator: torch.Generator | None = None,
    ) -> "DistributedGraph":
        """Partition a graph; every rank reads the source and keeps its part.

        Raises ConfigError for a scheme or grid that does not go with the number of ranks.

        Parameters
        ----------
        source : an `EdgeList`, a file read in pieces or a generator; the same on every rank
        mesh : the processes; one by default
        scheme
            two_dimensional, feature_parallel, rows, one_and_half_d, or auto: the cheapest by
            `planner.plan` for the sizes that follow.
        grid : Px x Py for two_dimensional; the cheapest by default
        attention, heads, channels, num_entries
            The workload to plan for: gat, dot or rows (a formula of another form). Entries may be
            an estimate.
        machine : bandwidth, latency and memory for the plan
        chunks
            Number of chunks the channels are sent in, to overlap communication with compute
            (two_dimensional, gat); by default the choice of `planner.best_chunks`.
        bfloat16_wire
            Round float32 features to bfloat16 for sending; sums still accumulate in float32.
        regather
            Gather the features of columns again in the backward pass instead of keeping them
            (two_dimensional, gat): less memory.
        seed : seed of the vertices' random order
        generator
            Draws the seeds of dropout; the same on every rank, by default seeded with ``seed``.

        Examples
        --------
        >>> from bevatron.data.graphs.generators import Kronecker
        >>> graph = DistributedGraph.build(Kronecker(64, 512))
        >>> x = graph.scatter(torch.ones(64, 2, 3))
        >>> score = torch.zeros(len(x), 2)
        >>> torch.allclose(graph.graph_attention(x, score, score), torch.ones(64, 2, 3))
        True
        """
        mesh = mesh or Mesh()
        if scheme not in {"auto", *planner.SCHEMES}:
            raise ConfigError(
                f"graph partition: scheme '{scheme}' is not known; choose auto or one of "
                f"{', '.join(planner.SCHEMES)}"
            )
        drawn: int = getattr(source, "num_drawn", 16 * source.num_vertices)
        entries = drawn if num_entries is None else num_entries
        work = planner.Workload(
            source.num_vertices, entries, heads, channels, attention, softmax=True
        )
        chosen = None
        if scheme == "auto" or (scheme == "two_dimensional" and grid is None):
            wanted = None if scheme == "auto" else [scheme]
            chosen = planner.plan(work, mesh.world, schemes=wanted, machine=machine)
            scheme, grid = chosen.chosen.scheme, chosen.chosen.grid
        planner.check(scheme, attention)
        wire = Wire(bfloat16_wire)
        if scheme == "two_dimensional":
            assert grid is not None
            chunks = chunks or planner.best_chunks(grid, work, machine)
            made = build.build_two_dimensional(
                source, mesh, grid, seed=seed, chunks=chunks, wire=wire, regather=regather
            )
        elif scheme == "feature_parallel":
            made = build.build_feature_parallel(source, mesh, seed=seed, wire=wire)
        elif scheme == "rows":
            made = build.build_rows(source, mesh, seed=seed)
        else:
            made = build.build_one_and_half_d(source, mesh, seed=seed)
        generator = generator or torch.Generator().manual_seed(seed)
        return cls(source.num_vertices, made, mesh, chosen, generator)

    @property
    def vertices(self) -> Int64[Tensor, "T"]:
        """Original numbers of the vertices that this rank holds, in order."""
        return self.scheme.vertices

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.scheme.everyone

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns as layers see them: this rank's vertices."""
        return len(self.vertices), len(self.vertices)

    @property
    def values(self) -> Tensor | None:
        """Edge weights of this rank's block, or None."""
        return self.scheme.block.values

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.mesh.device

    @property
    def whole_rows(self) -> Csr:
        """The matrix of this rank's rows; the features of its columns are those of `fetch`.

        Raises ConfigError for a partition in which rows are not whole.
        """
        return self._rows.block

    @property
    def _rows(self) -> Rows:
        if not isinstance(self.scheme, Rows):
            raise ConfigError(
                f"graph partition: scheme '{self.scheme.name}' has GAT's attention and dot "
                "products; for other formulas choose rows"
            )
        return self.scheme

    def fetch(self, values: Shaped[Tensor, "T *rest"]) -> Shaped[Tensor, "columns *rest"]:
        """Fetch the values of the columns of `whole_rows` from their ranks; all must call it."""
        return self._rows.fetch(values)

    def add_up(self, values: Shaped[Tensor, "columns *rest"]) -> Shaped[Tensor, "T *rest"]:
        """Send values on the columns of `whole_rows` to their vertices and sum them."""
        return self._rows.add_up(values)

    def sum_of_shares(self, share: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Sum a term of every rank, differentiably; all must call it."""
        return sum_of_shares(share, self.everyone)

    def explain(self) -> list[str]:
        """Describe the partition and why it was chosen, one line each; all ranks must call it."""
        block = self.scheme.block
        counts = torch.tensor([block.nnz], device=self.mesh.device)
        nnz = self.everyone.all_gather(counts).wait()
        first = (
            f"{self.scheme.name} over {self.mesh.world} ranks: {self.num_vertices} vertices, "
            f"blocks of {int(nnz.min())} to {int(nnz.max())} entries "
            f"(heaviest {float(nnz.max() / nnz.double().mean().clamp(min=1)):.2f} x the mean)"
        )
        return [first] + (self.plan.explain() if self.plan is not None else [])

    def scatter(self, values: Shaped[Tensor, "N *rest"]) -> Shaped[Tensor, "T *rest"]:
        """Select this rank's rows of a tensor that is replicated on every rank."""
        if len(values) != self.num_vertices:
            raise ConfigError(
                f"graph partition: the graph has {self.num_vertices} vertices, the tensor to "
                f"scatter has {len(values)} rows"
            )
        return values[self.vertices.to(values.device)].to(self.mesh.device)

    def gather(self, rows: Shaped[Tensor, "T *rest"]) -> Shaped[Tensor, "N *rest"]:
        """All-gather the rows of all ranks in the vertices' original order."""
        mine = torch.tensor([len(self.vertices)], device=self.mesh.device)
        lengths = [int(length) for length in self.everyone.all_gather(mine).wait()]
        longest = max(*lengths, 1)
        flat = pad_rows(rows.detach(), longest)
        parts = self.everyone.all_gather(flat).wait().split(longest)
        ids = self.everyone.all_gather(pad_rows(self.vertices, longest)).wait().split(longest)
        whole = rows.new_zeros((self.num_vertices, *rows.shape[1:]))
        for part, places, length in zip(parts, ids, lengths, strict=True):
            whole[places[:length]] = part[:length]
        return whole

    def graph_attention(
        self,
        x: Float[Tensor, "T H C"],
        row_score: Float[Tensor, "T H"],
        col_score: Float[Tensor, "T H"],
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        *,
        seed: int | None = None,
    ) -> Float[Tensor, "T H C"]:
        """Attend as `bevatron.kernels.graph.graph_attention` does, over all ranks.

        Parameters
        ----------
        x, row_score, col_score : features and scores of this rank's vertices
        negative_slope : slope of LeakyReLU below zero
        dropout : probability that an entry is left out of a head's sum
        seed : seed of the mask, the same on every rank; by default another one at every call
        """
        if dropout > 0 and seed is None:
            seed = int(torch.randint(2**62, (1,), generator=self.generator))
        return self.scheme.graph_attention(
            x.contiguous(),
            row_score.contiguous(),
            col_score.contiguous(),
            negative_slope=negative_slope,
            dropout=dropout,
            seed=seed or 0,
        )

    def dot_attention(
        self,
        x: Float[Tensor, "T H C"],
        *,
        normalize: bool = False,
        softmax: bool = False,
        scale: float | Tensor = 1.0,
    ) -> Float[Tensor, "T H C"]:
        """Attend as `bevatron.kernels.graph.dot_attention` does, over all ranks.

        Raises ConfigError for feature_parallel, which splits the features.

        Parameters
        ----------
        x : features of this rank's vertices: queries, keys and values
        normalize, softmax : cosines instead of dot products; scores of each row normalised
        scale : one number, or a tensor of one or of one for each head, which may train
        """
        beta = scale if isinstance(scale, Tensor) else x.new_full((1,), scale)
        return self.scheme.dot_attention(
            x.contiguous(), beta.reshape(-1), normalize=normalize, softmax=softmax
        )

    def sum(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """All-reduce sums over each rank's vertices; every vertex counts once."""
        return self.everyone.all_reduce(values.detach().clone()).wait() / self.scheme.replicas

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """All-reduce the gradients of replicated parameters, one message per dtype."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        pending: list[tuple[list[nn.Parameter], Pending]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            alike = [parameter for parameter in trained if parameter.dtype == dtype]
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in alike]
            )
            pending.append((alike, self.everyone.all_reduce(flat)))
        for alike, message in pending:
            total = message.wait() / self.scheme.replicas
            parts = total.split([parameter.numel() for parameter in alike])
            for parameter, part in zip(alike, parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
