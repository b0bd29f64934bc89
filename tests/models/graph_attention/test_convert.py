"""Layers of PyTorch Geometric: the same outputs and gradients in float64."""

import pytest
import torch
from torch import nn

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr
from bevatron.models.graph_attention.convert import from_agnn_conv, from_gat_conv, from_gatv2_conv
from bevatron.models.graph_attention.layers import Sgc, gcn, gin

pyg = pytest.importorskip("torch_geometric.nn", reason="needs torch_geometric")
N, IN, OUT = 9, 5, 3


def graph(self_loops):
    """The same directed graph for both; PyG adds self loops itself where it wants them."""
    edges = torch.rand(N, N) < 0.3
    edges[3], edges[:, 5], edges[6] = False, False, True
    edges.fill_diagonal_(False)
    receiver, sender = edges.nonzero(as_tuple=True)
    theirs = torch.stack([sender, receiver])
    if self_loops:
        loop = torch.arange(N)
        receiver, sender = torch.cat([receiver, loop]), torch.cat([sender, loop])
    return Csr.from_coo(receiver, sender, (N, N)), theirs


def same(layer, ours_state, conv, names, *, self_loops=True):
    """Compare outputs, the gradient by the features, and those by parameters in pairs."""
    csr, edges = graph(self_loops)
    x = torch.randn(N, IN, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = layer(csr, mine), conv(theirs, edges)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    probe = torch.randn_like(want)
    (got * probe).sum().backward()
    (want * probe).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    parameters = dict(conv.named_parameters())
    for parameter, (name, arrange) in zip(ours_state, names, strict=True):
        torch.testing.assert_close(
            parameter.grad, arrange(parameters[name].grad), rtol=1e-10, atol=1e-12
        )


def by_head(heads):
    return lambda matrix: matrix.reshape(heads, -1, matrix.shape[1]).transpose(1, 2)


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("heads", [1, 4])
def test_gat(heads, concat):
    conv = pyg.GATConv(IN, OUT, heads=heads, concat=concat, negative_slope=0.1).double()
    nn.init.normal_(conv.bias)
    combine = "concat" if concat else "mean"
    layer = from_gat_conv(conv.state_dict(), combine=combine, slope=0.1)
    parameters = [layer.weight, layer.learned["column"], layer.learned["row"], layer.bias]
    names = [
        ("lin.weight", by_head(heads)),
        ("att_src", lambda g: g[0]),
        ("att_dst", lambda g: g[0]),
        ("bias", lambda g: g),
    ]
    same(layer, parameters, conv, names)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("heads", [1, 4])
def test_gatv2(heads, share):
    conv = pyg.GATv2Conv(IN, OUT, heads=heads, share_weights=share).double()
    for bias in (conv.bias, conv.lin_l.bias, conv.lin_r.bias):
        nn.init.normal_(bias)
    layer = from_gatv2_conv(conv.state_dict())
    parameters = [layer.weight, layer.inner_bias, layer.learned["attention"]]
    names = [
        ("lin_l.weight", by_head(heads)),
        ("lin_l.bias", lambda g: g.reshape(heads, -1)),
        ("att", lambda g: g[0]),
    ]
    if not share:
        parameters += [layer.learned["query"], layer.learned["bias_query"]]
        names += [("lin_r.weight", by_head(heads)), ("lin_r.bias", lambda g: g.reshape(heads, -1))]
    same(layer, parameters, conv, names)


def test_agnn():
    conv = pyg.AGNNConv().double()
    nn.init.constant_(conv.beta, 1.7)
    layer = from_agnn_conv(conv.state_dict(), IN)
    same(layer, [layer.learned["beta"]], conv, [("beta", lambda g: g)])


def test_agnn_with_a_fixed_beta():
    conv = pyg.AGNNConv(requires_grad=False).double()
    layer = from_agnn_conv({}, IN, beta=float(conv.beta)).double()
    same(layer, [], conv, [])
    assert not any(p.requires_grad for p in layer.parameters())


def test_gcn():
    conv = pyg.GCNConv(IN, OUT).double()
    layer = gcn(IN, OUT).double()
    layer.load_state_dict({"weight": conv.lin.weight.T[None], "bias": conv.bias})
    same(layer, [layer.weight], conv, [("lin.weight", lambda g: g.T[None])])


@pytest.mark.parametrize("outputs", [OUT, IN + 2])
def test_sgc(outputs):
    conv = pyg.SGConv(IN, outputs, K=3).double()
    layer = Sgc(IN, outputs, hops=3).double()
    with torch.no_grad():
        layer.weight.copy_(conv.lin.weight.T)
        layer.bias.copy_(conv.lin.bias)
    same(layer, [layer.weight], conv, [("lin.weight", lambda g: g.T)])


def test_gin():
    mlp = nn.Sequential(nn.Linear(IN, 6), nn.ReLU(), nn.Linear(6, OUT)).double()
    conv = pyg.GINConv(mlp, eps=0.3, train_eps=True).double()
    layer = gin(mlp, IN, OUT, eps=0.3, trained=True).double()
    with torch.no_grad():
        layer.learned["eps"].copy_(conv.eps)
    same(layer, [layer.learned["eps"]], conv, [("eps", lambda g: g)], self_loops=False)


def test_what_has_no_counterpart_is_refused_by_name():
    edges = pyg.GATConv(IN, OUT, edge_dim=2).state_dict()
    with pytest.raises(
        ConfigError, match=r"GATConv: the state dict has lin_edge.weight: edge feat"
    ):
        from_gat_conv(edges)
    with pytest.raises(ConfigError, match="edge features"):
        from_gatv2_conv(pyg.GATv2Conv(IN, OUT, edge_dim=2).state_dict())
    with pytest.raises(ConfigError, match=r"no lin_l.weight, it has"):
        from_gatv2_conv(pyg.GATConv(IN, OUT).state_dict())
    with pytest.raises(ConfigError, match="AGNNConv: does not have"):
        from_agnn_conv(pyg.GATConv(IN, OUT).state_dict(), IN)
