"""Random fields of tokens, alignment and templates, as the batch of a complex has them."""

import torch


def token_fields(num_tokens=7, rows=4, templates=2, real=None, seed=0):
    """Fields that the trunk reads; the first ``real`` tokens exist, padding holds other values."""
    g = torch.Generator().manual_seed(seed)
    N, S, T = num_tokens, rows, templates
    token = torch.arange(N)
    mask = token < (N if real is None else real)
    chain = 1 + token // 4
    bonds = torch.tensor([[1, 2], [3, 0], [-1, -1]])
    return {
        "token_mask": mask,
        "asym_id": chain,
        "entity_id": torch.ones(N, dtype=torch.int64),
        "sym_id": chain,
        "residue_index": token % 4,
        "token_index": token,
        "token_bonds": bonds,
        "msa": torch.randint(32, (S, N), generator=g, dtype=torch.int8),
        "deletion": torch.randint(9, (S, N), generator=g, dtype=torch.uint8),
        "msa_mask": mask.expand(S, N).clone(),
        "template_restype": torch.randint(32, (T, N), generator=g, dtype=torch.int8),
        "template_pseudo_beta": 8 * torch.randn(T, N, 3, generator=g, dtype=torch.float64),
        "template_pseudo_beta_mask": (torch.rand(T, N, generator=g) > 0.2) & mask,
        "template_backbone": 3 * torch.randn(T, N, 3, 3, generator=g, dtype=torch.float64),
        "template_backbone_mask": (torch.rand(T, N, generator=g) > 0.2) & mask,
    }


def inputs(num_tokens, width, seed=0):
    """A random input embedding in float64."""
    generator = torch.Generator().manual_seed(50 + seed)
    return torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
