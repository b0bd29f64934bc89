"""The model: no leak between molecules, split layers equal plain ones, every switch works."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_molecules import collate, random_batch, random_molecule, small_model

from bevatron.errors import ConfigError, DataError
from bevatron.models.gpspp import DropoutConfig, load_model, observe, save_model
from bevatron.models.gpspp.encoders import GaussianKernels
from bevatron.models.gpspp.graphs import Drops, Graphs, draw_drops
from bevatron.models.gpspp.layers import Stream
from bevatron.models.gpspp.shared import Shared

EVERYTHING = (
    "raw",
    "node_embedding",
    "edge_embedding",
    "node_logits",
    "edge_logits",
    "directions",
)


def masked(batch, keep_2d, keep_3d):
    inputs = observe(batch, "both")
    return replace(inputs, keep_2d=torch.tensor(keep_2d), keep_3d=torch.tensor(keep_3d))


@pytest.mark.parametrize("globals_", [True, False])
def test_a_molecule_alone_and_in_any_pack_gives_the_same(globals_):
    random = np.random.default_rng(1)
    sizes = [5, 1, 9, 2, 13]
    samples = [random_molecule(random, n, broken=n == 9) for n in sizes]
    model = small_model(torch.float64, denoising=True, globals_=globals_).eval()
    # One seen in 3D only, the others otherwise: this is where the official code leaks.
    views = [(False, True), (True, False), (False, True), (True, True), (False, True)]

    def run(members):
        batch = collate([samples[i] for i in members]).to("cpu", torch.float64)
        inputs = masked(batch, *zip(*(views[i] for i in members), strict=True))
        with torch.no_grad():
            return model(batch, inputs=inputs, compute=EVERYTHING)

    alone = run([2])
    for pack in ([2, 0], [0, 2, 1, 3], [4, 3, 2, 2]):
        place = pack.index(2)
        found = run(pack)
        atoms = sum(sizes[i] for i in pack[:place])
        edges = sum(len(samples[i]["bonds"]) for i in pack[:place])
        for name, expected in alone.items():
            start = {"raw": place}.get(name, edges if name.startswith("edge") else atoms)
            got = found[name][start : start + len(expected)]
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["2d", "3d", "both"])
def test_nothing_of_one_molecule_depends_on_another(mode):
    batch = random_batch([4, 6, 5]).to("cpu", torch.float64)
    leaves = {
        name: getattr(batch, name).clone().requires_grad_()
        for name in ("random_walk", "laplacian_vectors", "laplacian_values", "positions")
    }
    batch = replace(batch, **leaves)
    model = small_model(torch.float64).eval()
    raw = model(batch, inputs=observe(batch, mode), compute=("raw",))["raw"]
    gradients = torch.autograd.grad(raw[1].sum(), list(leaves.values()), materialize_grads=True)
    for name, gradient in zip(leaves, gradients, strict=True):
        own = slice(1, 2) if name == "laplacian_values" else slice(4, 10)
        if name != "positions" or mode != "2d":
            assert gradient[own].abs().max() > 0
        others = gradient.clone()
        others[own] = 0
        assert not others.any(), name


@pytest.mark.parametrize("sender", [True, False])
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("globals_", [True, False])
def test_split_layers_equal_the_equations(sender, adjacent, edges, globals_):
    model = small_model(
        torch.float64,
        sender_aggregation=sender,
        adjacent_aggregation=adjacent,
        edges=edges,
        globals_=globals_,
        noisy_edges=False,
    )
    batch = random_batch([5, 1, 7]).to("cpu", torch.float64)
    graphs = Graphs.of(batch)
    x = torch.randn(batch.num_atoms, 16, dtype=torch.float64)
    e = torch.randn(batch.num_edges, 8, dtype=torch.float64) if edges else None
    g = torch.randn(3, 4, dtype=torch.float64) if globals_ else None
    mpnn = model.blocks[0].mpnn
    kept = (torch.rand(batch.num_edges) > 0.3).double() / 0.7
    drops = Drops(edge=kept, global_=torch.tensor([2.0, 0.0, 2.0]))
    streams = (None if given is None else Stream(given, given) for given in (e, g))
    update, *streams = mpnn(Shared(x), *streams, graphs, drops)
    got = (update, *(None if stream is None else stream.wide for stream in streams))

    def mlp(module, rows):
        hidden = module.norm(module.first(rows))
        return module.second(torch.nn.functional.gelu(hidden, approximate="tanh"))

    s, r = batch.edges
    message, new_e, new_g = torch.cat([x[r], x[s]], 1), e, g
    if edges:
        parts = [x[r], x[s], e] + ([g[batch.edge_graph]] if globals_ else [])
        message = mlp(mpnn.edge, torch.cat(parts, 1)) * kept[:, None]
        new_e = e + message

    def summed(rows, index):
        return torch.zeros(batch.num_atoms, rows.shape[1]).double().index_add(0, index, rows)

    into = torch.cat([message, x[s]], 1) if adjacent else message
    out = torch.cat([message, x[r]], 1) if adjacent else message
    parts = [summed(into, r)] + ([summed(out, s)] if sender else []) + [x]
    nodes = mlp(mpnn.node, torch.cat(parts + ([g[batch.graph]] if globals_ else []), 1))
    if globals_:
        whole = torch.zeros(3, 16).double().index_add(0, batch.graph, nodes)
        parts = [g, whole]
        if edges:
            parts.append(torch.zeros(3, 8).double().index_add(0, batch.edge_graph, message))
        new_g = g + mlp(mpnn.global_, torch.cat(parts, 1)) * drops.global_[:, None]
    for found, expected in zip(got, (nodes, new_e, new_g), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": False},
        {"mpnn": False},
        {"ffn": False},
        {"edges": False, "noisy_edges": False},
        {"globals_": False},
        {"decoder": "nodes_and_global"},
        {"laplacian": False, "random_walk": False, "degree": False},
        {"shortest_paths": False},
        {"distance_bias": False},
        {"distance_sum": False},
        {"bond_lengths": False},
        {"shortest_paths": False, "distance_bias": False},
        {"distance_sum": False, "distance_bias": False, "bond_lengths": False},
        {"encoder_norm": False, "num_laplacian": 3, "num_walks": 2},
        {"denoising": True},
        {"denoising": True, "attention": False},
        {"feature_set": "ying21"},
    ],
    ids=str,
)
def test_every_switch_trains_every_parameter(changes):
    torch.manual_seed(1)
    model = small_model(**changes, dropout=DropoutConfig())
    batch = random_batch([6, 4, 7, 5], set_name=model.config.feature_set)
    names = {"node_logits", "raw"}
    names |= {"edge_logits"} if model.config.noisy_edges else set()
    names |= {"directions"} if model.config.denoising else set()
    found = model(batch, inputs=observe(batch, "both"), compute=names)
    sum((value**2).sum() for value in found.values()).backward()
    # Only message passing reads the global vector.
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    spare = [] if model.config.mpnn else ["encoders.global_"]
    assert idle == spare


def test_awkward_molecules_are_predicted():
    random = np.random.default_rng(0)
    samples = [random_molecule(random, n, with_3d=n < 5) for n in (1, 3, 90)]
    model = small_model().eval()
    empty = {k: v[:0] if v.ndim and k not in {"laplacian_values", "targets"} else v
             for k, v in samples[1].items()}  # fmt: skip
    for members in (samples[:1], samples, [samples[2], empty, samples[0]]):
        found = model(collate(members), inputs=observe(collate(members), "both"))["prediction"]
        assert found.shape == (len(members), 1)
        assert found.isfinite().all()


def test_a_molecule_without_pairs_is_passed_over():
    batch = random_batch([5, 4, 3])
    paths = torch.cat([batch.shortest_paths[:25], batch.shortest_paths[41:]])
    ptr = torch.tensor([0, 25, 25, 34])
    found = batch.has_positions & torch.tensor([True, False, True])
    holey = replace(batch, shortest_paths=paths, pair_ptr=ptr, has_positions=found)
    model = small_model(torch.float64, denoising=True).eval()
    results = []
    for one in (batch, holey):
        moved = one.to("cpu", torch.float64)
        seen = observe(moved, "both")
        results.append(model(moved, inputs=seen, compute=("prediction", "directions")))
    atoms = torch.tensor([*range(5), *range(9, 12)])
    for name, rows in (("prediction", torch.tensor([0, 2])), ("directions", atoms)):
        torch.testing.assert_close(
            results[1][name][rows], results[0][name][rows], rtol=1e-12, atol=1e-12
        )


def test_directions_follow_the_equations():
    batch = random_batch([4]).to("cpu", torch.float64)
    model = small_model(torch.float64, denoising=True).eval()
    head = model.denoising
    nodes, bias = torch.randn(4, 16).double(), torch.randn(16, 4).double()
    found = head(nodes, bias, batch, observe(batch, "both"), Graphs.of(batch))
    q, k, v = head.qkv(nodes).view(4, 3, 4, 4).permute(1, 2, 0, 3)
    scores = q @ k.transpose(1, 2) / 4**0.5 + bias.view(4, 4, 4).permute(2, 0, 1)
    weights = scores.softmax(-1)
    apart = batch.positions[None] - batch.positions[:, None]
    steps = apart / (apart.norm(dim=-1, keepdim=True) + 1e-5)
    for axis in range(3):
        moved = torch.einsum("hij,ij,hjd->ihd", weights, steps[..., axis], v).flatten(1)
        expected = moved @ head.axes.weight[axis] + head.axes.bias[axis]
        torch.testing.assert_close(found[:, axis], expected)


def test_products_in_16_bits_keep_statistics_and_targets_in_32():
    model = small_model(denoising=True).eval()
    batch = random_batch([6, 9, 4])
    inputs = observe(batch, "both")
    expected = model(batch, inputs=inputs, compute=EVERYTHING)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(batch, inputs=inputs, compute=EVERYTHING)
    assert found["raw"].dtype == torch.float32
    assert found["node_embedding"].dtype == torch.bfloat16
    assert found["edge_embedding"].dtype == torch.float32
    for name, value in expected.items():
        scale = value.abs().max()
        assert (found[name].float() - value).abs().max() < 0.05 * scale, name
    sum(value.float().sum() for value in found.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_gaussian_kernels_follow_the_formula_and_have_its_gradients():
    kernels = GaussianKernels(3).double()
    with torch.no_grad():
        kernels.std[1] *= -1
    r = torch.tensor([0.0, 0.3, 1.7], dtype=torch.float64, requires_grad=True)
    s = kernels.std.abs() + 0.01
    z = (r[:, None] - kernels.mean) / s
    expected = 0.1 * torch.exp(-0.5 * z**2) / ((2 * torch.pi) ** 0.5 * s)
    torch.testing.assert_close(kernels(r), expected)
    inputs = (r, kernels.mean, kernels.std)
    assert torch.autograd.gradcheck(lambda *_: kernels(r), inputs)


def test_gradients_of_all_parameters_are_those_of_finite_differences():
    model = small_model(torch.float64, num_layers=1, denoising=True, max_path=6).eval()
    batch = random_batch([5, 3]).to("cpu", torch.float64)
    # Beyond the reach of all kernels a bond length is encoded at a kink of the ReLU.
    batch = replace(batch, positions=0.2 * batch.positions)
    inputs = observe(batch, "both")
    with torch.no_grad():
        factors = {
            k: torch.randn_like(v)
            for k, v in model(batch, inputs=inputs, compute=EVERYTHING).items()
        }

    def value():
        found = model(batch, inputs=inputs, compute=EVERYTHING)
        return sum((factors[name] * one).sum() for name, one in found.items())

    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(value(), parameters)
    steps = [1e-6 * torch.randn_like(parameter) for parameter in parameters]
    groups = defaultdict(list)
    for place, name in enumerate(names):
        groups[".".join(name.split(".")[: 3 if name.startswith("blocks") else 2])].append(place)
    for name, places in groups.items():
        ends = []
        for factor in (1, -2):
            with torch.no_grad():
                for i in places:
                    parameters[i].add_(steps[i], alpha=factor)
                ends.append(float(value()))
        with torch.no_grad():
            for i in places:
                parameters[i].add_(steps[i])
        expected = sum(float((gradients[i] * steps[i]).sum()) for i in places)
        assert (ends[0] - ends[1]) / 2 == pytest.approx(expected, rel=1e-4, abs=1e-10), name


def test_dropout_takes_whole_rows_and_rises_with_depth():
    config = small_model(num_layers=5, dropout=DropoutConfig()).config
    batch = random_batch([6] * 400)
    torch.manual_seed(0)
    drops = draw_drops(config, Graphs.of(batch))
    assert (drops[0].attention, drops[0].ffn) == (None, None)
    shares = []
    for layer in range(1, 5):
        factor = drops[layer].attention.view(400, 6)
        assert (factor == factor[:, :1]).all(), "a molecule is dropped as a whole"
        assert not torch.equal(factor, drops[layer].ffn.view(400, 6))
        kept = 1 / (1 - config.graph_dropout(layer))
        torch.testing.assert_close(factor.max(), torch.tensor(kept))
        shares.append(float((factor == 0).double().mean()))
    np.testing.assert_allclose(shares, [0.075, 0.15, 0.225, 0.3], atol=0.06)
    assert abs(float((drops[3].node == 0).double().mean()) - 0.3) < 0.04
    for found, rate in ((drops[3].node, 0.3), (drops[0].edge, 0.0035), (drops[1].global_, 0.35)):
        torch.testing.assert_close(found.max(), torch.tensor(1 / (1 - rate)))
    assert drops[0].edge.shape == (batch.num_edges,)
    assert len({int(drop.seed) for drop in drops}) == 5
    again = draw_drops(config, Graphs.of(batch))
    assert not torch.equal(again[1].node, drops[1].node)


def test_training_is_random_and_evaluation_is_not():
    batch = random_batch([6, 9])
    model = small_model(dropout=DropoutConfig())
    first, second = (model(batch)["prediction"] for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(batch)["prediction"], model(batch)["prediction"])


def test_modes_show_what_they_say():
    batch = random_batch([6, 5])
    moved = replace(batch, positions=batch.positions * 1.5)
    no_paths = replace(batch, shortest_paths=torch.zeros_like(batch.shortest_paths))
    model = small_model().eval()

    def predicted(shown, mode):
        return model(shown, inputs=observe(shown, mode))["prediction"]

    for mode, sees_positions, sees_paths in (("2d", 0, 1), ("3d", 1, 0), ("both", 1, 1)):
        plain = predicted(batch, mode)
        assert torch.equal(plain, predicted(moved, mode)) != bool(sees_positions)
        assert torch.equal(plain, predicted(no_paths, mode)) != bool(sees_paths)
    without = replace(batch, has_positions=torch.tensor([False, True]))
    torch.testing.assert_close(predicted(without, "3d")[0], predicted(batch, "2d")[0])


def test_batches_of_other_features_are_refused():
    model = small_model()
    with pytest.raises(DataError, match=r"have 9 features per atom and 3 per bond.*'set1' has 11"):
        model(random_batch([3], set_name="original"))
    batch = random_batch([3])
    batch.atom_features[1, 2] = 18
    with pytest.raises(DataError, match="'group' has the value 18, expected 0 to 17"):
        model(batch)
    with pytest.raises(ConfigError, match="'directions' needs a model with denoising"):
        model(random_batch([3]), compute=("directions",))


def test_a_model_comes_back_from_its_folder(tmp_path):
    model = small_model(globals_=False)
    save_model(model, tmp_path)
    batch = random_batch([4, 5])
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(batch)["prediction"], model.eval()(batch)["prediction"])
