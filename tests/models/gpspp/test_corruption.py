"""What a model is shown in training: masks per molecule, noise, signs."""

import numpy as np
import pytest
import torch
from random_molecules import collate, random_batch, random_molecule

from bevatron.data.samples import feature_set
from bevatron.errors import ConfigError
from bevatron.models.gpspp import CorruptionConfig, corrupt, observe

SET1 = feature_set("set1")


@pytest.fixture
def batch():
    random = np.random.default_rng(0)
    samples = [random_molecule(random, 3 + i % 3, with_3d=i % 4 != 0) for i in range(8)]
    return collate([samples[i % 8] for i in range(4000)])


def test_molecules_are_seen_in_the_odds_asked_for(batch):
    shown = corrupt(batch, CorruptionConfig(), SET1)
    known = batch.has_positions
    assert shown.keep_2d[~known].all()
    assert not shown.keep_3d[~known].any()
    keep_2d, keep_3d = shown.keep_2d[known], shown.keep_3d[known]
    assert (keep_2d | keep_3d).all()
    shares = [(keep_2d & ~keep_3d), (keep_3d & ~keep_2d), (keep_2d & keep_3d)]
    found = [float(share.double().mean()) for share in shares]
    np.testing.assert_allclose(found, [0.2, 0.6, 0.2], atol=0.03)
    torch.testing.assert_close(shown.only_3d, shown.keep_3d & ~shown.keep_2d)


def test_without_use_of_positions_all_paths_are_seen(batch):
    shown = corrupt(batch, CorruptionConfig(), SET1, uses_positions=False)
    assert shown.keep_2d is None
    assert shown.keep_3d is None
    assert torch.equal(shown.positions, batch.positions)


def test_entries_are_drawn_anew_from_their_vocabulary(batch):
    config = CorruptionConfig(node_noise=0.5, edge_noise=0.0)
    shown = corrupt(batch, config, SET1)
    assert torch.equal(shown.bond_features, batch.bond_features)
    changed = (shown.atom_features != batch.atom_features).double().mean(0)
    # A draw may hit the old value.
    expected = [0.5 * (1 - 1 / size) for size in SET1.atom_sizes]
    np.testing.assert_allclose(changed, expected, atol=0.02)
    sizes = torch.tensor(SET1.atom_sizes)
    assert (shown.atom_features >= 0).all()
    assert (shown.atom_features < sizes).all()
    assert shown.atom_features[:, 0].unique().numel() == 119


def test_signs_are_those_of_a_molecule_and_drawn_every_time(batch):
    first, second = (corrupt(batch, CorruptionConfig(), SET1) for _ in range(2))
    assert torch.equal(first.laplacian_vectors.abs(), batch.laplacian_vectors.abs())
    assert not torch.equal(first.laplacian_vectors, second.laplacian_vectors)
    flipped = first.laplacian_vectors * batch.laplacian_vectors < 0
    kept = first.laplacian_vectors * batch.laplacian_vectors > 0
    graph = batch.graph[:, None].expand(-1, 7)
    per_graph = torch.zeros(2, batch.num_graphs, 7)
    for side, mask in enumerate((flipped, kept)):
        per_graph[side].scatter_add_(0, graph, mask.float())
    assert not ((per_graph[0] > 0) & (per_graph[1] > 0)).any()
    assert 0.4 < float((per_graph[0] > 0).double().sum() / (per_graph > 0).sum()) < 0.6


def test_noise_on_positions_is_told(batch):
    config = CorruptionConfig(position_noise=0.2)
    shown = corrupt(batch, config, SET1, denoising=True)
    torch.testing.assert_close(shown.positions, batch.positions + 0.2 * shown.position_noise)
    assert abs(float(shown.position_noise.std()) - 1) < 0.02


def test_shapes_do_not_depend_on_what_is_drawn():
    """As a captured step needs; nothing is asked of the device either (meta has no numbers)."""
    batch = random_batch([4, 5])._map(lambda _, tensor: tensor.to("meta"))
    shown = corrupt(batch, CorruptionConfig(), SET1, denoising=True)
    assert shown.atom_features.shape == batch.atom_features.shape


@pytest.mark.parametrize(
    "changes", [{"node_noise": 1.5}, {"masking": (0.0, 0.0, 0.0)}, {"position_noise": 0.0}]
)
def test_values_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        CorruptionConfig(**changes)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="expected one of 2d, 3d, both, got '4d'"):
        observe(random_batch([3]), "4d")
