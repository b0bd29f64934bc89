"""AlphaFold3's confidence head: against reference values, and what holds for any weights."""

import importlib

import pytest
import torch

from bevatron.models.alphafold3.confidence import ConfidenceHead
from bevatron.models.alphafold3.config_diffusion import ConfidenceConfig, TrunkWidths
from bevatron.models.alphafold3.config_trunk import PairConfig, PairformerConfig
from bevatron.models.common.folding import Checkpointing
from bevatron.testing import assert_close

golden_modules = importlib.import_module("golden_modules")
random_complex = importlib.import_module("random_complex")

WIDTHS = TrunkWidths(inputs=9, single=8, pair=6)
ATOMS_OF_TOKEN = [5, 1, 9, 4, 1]
TOLERANCE = 1e-11


@pytest.mark.shared
@pytest.mark.parametrize("kind", ["none", "all"])
def test_confidence_head(shared, kind):
    golden = golden_modules.reference(shared, "confidence_head")
    pairformer = PairformerConfig(num_blocks=1, head_width=1, pair=PairConfig(dropout=0.0))
    config = ConfidenceConfig(pairformer, 16, 16, 50, atoms_per_token=20)
    head = ConfidenceHead(config, TrunkWidths(14, 16, 10), Checkpointing(kind))
    golden_modules.load(head, golden)
    batch = golden_modules.sample(golden)
    batch["representative_atom"] = batch["distogram_rep_atom_mask"].nonzero()[:, 0]
    trunk = (batch["s_inputs"], batch["s_trunk"], batch["z_trunk"])
    logits = head(batch, *trunk, batch["x_pred"][0])
    found = {name: value[None] for name, value in logits._asdict().items()}
    golden_modules.check(golden, head, found)


@pytest.fixture
def head():
    pair = PairConfig(hidden=4, num_heads=2, head_width=4, transition=2, dropout=0.0)
    pairformer = PairformerConfig(1, num_heads=2, head_width=4, transition=2, pair=pair)
    head = ConfidenceHead(ConfidenceConfig(pairformer), WIDTHS, Checkpointing()).double()
    random_complex.randomise(head)
    return head


@pytest.fixture
def batch():
    return random_complex.features(ATOMS_OF_TOKEN)


def coordinates(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 5 * torch.randn(20, 3, generator=generator, dtype=torch.float64)


def test_padding_changes_no_logit(head, batch):
    trunk = random_complex.trunk(5, WIDTHS)
    expected = head(batch, *trunk, coordinates())
    wide, filled = random_complex.padded(batch, trunk, atoms=30, tokens=2)
    x = torch.cat([coordinates(), torch.full((30, 3), 9.0, dtype=torch.float64)])
    found = head(wide, *filled, x)
    assert_close(found.plddt[:20], expected.plddt, TOLERANCE)
    assert_close(found.resolved[:20], expected.resolved, TOLERANCE)
    assert_close(found.pae[:5, :5], expected.pae, TOLERANCE)
    assert_close(found.pde[:5, :5], expected.pde, TOLERANCE)


def test_samples_of_a_batch_do_not_mix(head, batch):
    other = random_complex.features([1, 4, 4, 2, 9], seed=8)
    first, second = (random_complex.trunk(5, WIDTHS, seed) for seed in (0, 8))
    both = {name: torch.stack([batch[name], other[name]]) for name in batch}
    trunk = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    found = head(both, *trunk, torch.stack([coordinates(), coordinates(8)]))
    alone = (head(batch, *first, coordinates()), head(other, *second, coordinates(8)))
    for number in (0, 1):
        for value, expected in zip(found, alone[number], strict=True):
            assert_close(value[number], expected, TOLERANCE)


def test_the_trunk_learns_nothing_from_it(head, batch):
    given = [x.requires_grad_() for x in (*random_complex.trunk(5, WIDTHS), coordinates())]
    logits = head(batch, *given)
    sum(value.sum() for value in logits).backward()
    assert all(x.grad is None for x in given)
    assert all(weight.grad is not None for weight in head.parameters())


def test_entries_of_the_single_representation_count_up_to_512(head, batch):
    s_inputs, s, z = random_complex.trunk(5, WIDTHS)
    s = s * 1000
    largest = s.clamp(-512, 512)
    assert not torch.equal(s, largest)
    found, expected = (head(batch, s_inputs, x, z, coordinates()) for x in (s, largest))
    for value, wanted in zip(found, expected, strict=True):
        assert_close(value, wanted, TOLERANCE)


def test_logits_of_a_trunk_in_bfloat16_are_computed_in_float32(head, batch):
    _, *state = (x.bfloat16() for x in random_complex.trunk(5, WIDTHS))
    found = head.float().logits(batch, *state)
    expected = head.double().logits(batch, *(x.double() for x in state))
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == torch.float32
        assert_close(value.double(), wanted, 1e-5)


def test_errors_of_distances_are_symmetric_and_blind_to_motions(head, batch):
    trunk, x = random_complex.trunk(5, WIDTHS), coordinates()
    logits = head(batch, *trunk, x)
    assert_close(logits.pde, logits.pde.transpose(0, 1), TOLERANCE)
    turned = head(batch, *trunk, x[:, [1, 2, 0]] + 4)
    for value, expected in zip(turned, logits, strict=True):
        assert_close(value, expected, 1e-9)
