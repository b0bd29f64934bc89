"""Steps of models of GPS++'s size as one would write them today, for `gpspp_step.py`.

- ``eager``, ``compiled``: GPS++'s blocks in plain PyTorch: layers on concatenated inputs,
  `index_add` for sums, attention by scaled_dot_product_attention on molecules padded to 20 atoms
  with a ready bias. No encoders, no noisy heads, no dropout: less work than ours.
- ``pyg``, ``pyg-compiled``: 16 of PyTorch Geometric's GPSConv (GINE with a network wide enough for
  the same number of parameters, multi-head attention without a bias).

All in bfloat16 throughout, fused Adam, no clipping.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevatron.data.samples import MoleculeBatch

LARGEST, WIDTH, EDGE, GLOBAL, HEADS, LAYERS = 20, 256, 128, 64, 32, 16


def network(width_in: int, width_out: int) -> nn.Sequential:
    """Make a two-layer network as in GPS++."""
    hidden = 4 * width_out
    return nn.Sequential(
        nn.Linear(width_in, hidden),
        nn.LayerNorm(hidden),
        nn.GELU(approximate="tanh"),
        nn.Linear(hidden, width_out),
    )


class PaddedBlock(nn.Module):
    """A block of GPS++ with padded attention."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = network(2 * WIDTH + EDGE + GLOBAL, EDGE)
        self.node = network(2 * (EDGE + WIDTH) + WIDTH + GLOBAL, WIDTH)
        self.global_ = network(GLOBAL + WIDTH + EDGE, GLOBAL)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(
        self, x: Tensor, e: Tensor, g: Tensor, bias: Tensor, index: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update nodes, edges and globals."""
        s, r, graph, edge_graph = (index[k] for k in ("senders", "receivers", "graph", "edges"))
        of_r, of_s = x.index_select(0, r), x.index_select(0, s)
        message = self.edge(torch.cat([of_r, of_s, e, g.index_select(0, edge_graph)], 1))
        zeros = x.new_zeros(len(x), EDGE + WIDTH)
        into = zeros.index_add(0, r, torch.cat([message, of_s], 1))
        out_of = zeros.index_add(0, s, torch.cat([message, of_r], 1))
        update = self.node(torch.cat([into, out_of, x, g.index_select(0, graph)], 1))
        nodes = g.new_zeros(len(g), WIDTH).index_add(0, graph, update)
        messages = g.new_zeros(len(g), EDGE).index_add(0, edge_graph, message)
        new_g = g + self.global_(torch.cat([g, nodes, messages], 1))
        padded = x.new_zeros(len(g) * LARGEST, 3 * WIDTH)
        padded = padded.index_copy(0, index["place"], self.qkv(x))
        q, k, v = padded.view(len(g), LARGEST, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).reshape(-1, WIDTH)
        attended = self.out(found.index_select(0, index["place"]))
        m = self.norms[0](x + update) + self.norms[1](x + attended)
        return self.norms[2](m + self.ffn(m)), e + message, new_g


class Padded(nn.Module):
    """All blocks and a read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PaddedBlock() for _ in range(LAYERS))
        self.read = network(WIDTH, 1)

    def forward(
        self, x: Tensor, e: Tensor, g: Tensor, bias: Tensor, index: dict[str, Tensor]
    ) -> Tensor:
        """Return one loss."""
        for block in self.blocks:
            x, e, g = block(x, e, g, bias, index)
        pooled = g.new_zeros(len(g), WIDTH).index_add(0, index["graph"], x)
        return self.read(pooled).float().abs().mean()


class Geometric(nn.Module):
    """GPSConv layers of PyTorch Geometric and a read-out."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GINEConv, GPSConv

        def layer() -> nn.Module:
            wide = nn.Sequential(nn.Linear(WIDTH, 4096), nn.GELU(), nn.Linear(4096, WIDTH))
            return GPSConv(WIDTH, GINEConv(wide, edge_dim=EDGE), heads=HEADS)

        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.read = network(WIDTH, 1)

    def forward(
        self, x: Tensor, e: Tensor, g: Tensor, bias: Tensor, index: dict[str, Tensor]
    ) -> Tensor:
        """Return one loss."""
        del bias
        edges = torch.stack([index["senders"], index["receivers"]])
        for layer in self.layers:
            x = layer(x, edges, batch=index["graph"], edge_attr=e)
        pooled = g.new_zeros(len(g), WIDTH).index_add(0, index["graph"], x)
        return self.read(pooled).float().abs().mean()


def inputs_of(batch: MoleculeBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Draw features for a batch's graphs; the bias masks what is padding."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    moved = batch.to(device)
    senders, receivers = moved.edges.unbind()
    within = torch.arange(batch.num_atoms, device=device) - moved.graph_ptr[moved.graph]
    index = {
        "senders": senders.contiguous(),
        "receivers": receivers.contiguous(),
        "graph": moved.graph,
        "edges": moved.edge_graph,
        "place": moved.graph * LARGEST + within,
    }
    shape = (batch.num_graphs, HEADS, LARGEST, LARGEST)
    bias = torch.randn(shape, device=device, dtype=dtype)
    sizes = moved.graph_ptr.diff()
    outside = torch.arange(LARGEST, device=device)[None, :] >= sizes[:, None]
    bias.masked_fill_(outside[:, None, None, :], -1e4)
    x, e, g = (
        torch.randn(count, width, device=device, dtype=dtype)
        for count, width in (
            (batch.num_atoms, WIDTH),
            (batch.num_edges, EDGE),
            (batch.num_graphs, GLOBAL),
        )
    )
    return x, e, g, bias.requires_grad_(), index


def peer_step(name: str, batch: MoleculeBatch) -> tuple[Callable[[], object], str]:
    """Return what runs one step, and what it is called in the table."""
    torch.manual_seed(0)
    kind = Geometric if name.startswith("pyg") else Padded
    model = kind().to("cuda", torch.bfloat16)
    inputs = inputs_of(batch)
    run = torch.compile(model) if name.endswith("compiled") else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    count = sum(p.numel() for p in model.parameters()) / 1e6

    def step() -> object:
        optimizer.zero_grad(set_to_none=True)
        inputs[3].grad = None
        loss = run(*inputs)
        loss.backward()
        optimizer.step()
        return loss

    labels = {
        "eager": "plain PyTorch, padded attention",
        "compiled": "the same, torch.compile",
        "pyg": "PyTorch Geometric, GPSConv",
        "pyg-compiled": "PyTorch Geometric, compiled",
    }
    return step, f"{labels[name]} ({count:.1f}M parameters)"
