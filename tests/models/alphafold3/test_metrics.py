"""What validation of AlphaFold3 judges the distogram by."""

import pytest
import torch

from bevatron.models.alphafold3.metrics import ComplexMetrics


@pytest.fixture
def chains():
    """Two chains of 60 tokens, each folded into one place, 100 Å apart."""
    number = torch.arange(120)
    return {
        "asym_id": 1 + number // 60,
        "residue_index": number % 60,
        "representative_atom": number,
        "token_mask": torch.ones(120, dtype=torch.bool),
        "molecule_type": torch.zeros(120, dtype=torch.int64),
    }


def test_contacts_are_judged_within_chains(chains):
    """All are, and the model is surest of contacts between the chains, of which there are none."""
    second = chains["asym_id"] == 2
    truth = torch.zeros(120, 3).index_fill(0, second.nonzero()[:, 0], 100.0)
    logits = torch.zeros(120, 120, 64)
    logits[..., 0] = torch.where(second[:, None] != second, 9.0, 3.0)
    resolved = torch.ones(120, dtype=torch.bool)
    contacts = ComplexMetrics._contacts
    assert contacts(chains, {"distogram": logits}, truth, resolved) == 1.0


@pytest.mark.parametrize(("seen", "counts"), [(0, 0.0), (1, 0.0), (2, 1.0)])
def test_a_structure_without_two_observed_tokens_has_no_distogram(chains, seen, counts):
    outputs = {"distogram": torch.zeros(120, 120, 64)}
    resolved = torch.arange(120) < seen
    _, number = ComplexMetrics._distogram(chains, outputs, torch.randn(120, 3), resolved)
    assert number == counts
