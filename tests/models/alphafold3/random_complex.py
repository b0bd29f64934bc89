"""Random features of a small complex and random output of a trunk."""

import torch

from bevatron.models.alphafold3.conditioning import NoiseEmbedding


def features(atoms_of_token, seed=0):
    """A sample's features under the names that models take, in float64."""
    generator = torch.Generator().manual_seed(seed)
    A, N = sum(atoms_of_token), len(atoms_of_token)
    token = torch.arange(N)
    atom_to_token = token.repeat_interleave(torch.tensor(atoms_of_token))
    return {
        "ref_pos": torch.randn(A, 3, generator=generator, dtype=torch.float64),
        "ref_charge": torch.randint(-1, 2, (A,), generator=generator).double(),
        "ref_mask": torch.rand(A, generator=generator) > 0.1,
        "ref_element": torch.randint(128, (A,), generator=generator),
        "ref_atom_name_chars": torch.randint(64, (A, 4), generator=generator),
        "ref_space_uid": atom_to_token // 2,
        "atom_to_token": atom_to_token,
        "atom_mask": torch.ones(A, dtype=torch.bool),
        "token_mask": torch.ones(N, dtype=torch.bool),
        "asym_id": 1 + token // 4,
        "entity_id": torch.ones(N, dtype=torch.int64),
        "sym_id": 1 + token // 4,
        "residue_index": token % 4,
        "token_index": token,
        "representative_atom": torch.tensor(atoms_of_token).cumsum(0) - 1,
    }


def trunk(num_tokens, widths, seed=0):
    """Input embedding, single and pair representation."""
    generator = torch.Generator().manual_seed(100 + seed)
    shapes = [
        (num_tokens, widths.inputs),
        (num_tokens, widths.single),
        (num_tokens, num_tokens, widths.pair),
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def padded(batch, trunk_output, atoms, tokens):
    """The same with padded atoms and tokens, filled with what is far from the valid values."""
    N = len(batch["token_mask"])
    wide = {}
    for name, x in batch.items():
        more = tokens if len(x) == N and not name.startswith(("ref_", "atom_")) else atoms
        fill = 0 if x.dtype in {torch.bool, torch.int64} else 50.0
        wide[name] = torch.cat([x, torch.full((more, *x.shape[1:]), fill, dtype=x.dtype)])
    grown = []
    for x, axes in zip(trunk_output, (1, 1, 2), strict=True):
        shape = [size + tokens if axis < axes else size for axis, size in enumerate(x.shape)]
        grown.append(torch.full(shape, 60.0, dtype=x.dtype))
        grown[-1][(slice(0, N),) * axes] = x
    return wide, grown


def randomise(module, seed=0):
    """Replace all weights, which are partly zero at first, by random ones."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        scale = weight.shape[-1] ** -0.5
        with torch.no_grad():
            weight.copy_(scale * torch.randn(weight.shape, generator=generator).double())
    for part in module.modules():
        if isinstance(part, NoiseEmbedding):
            part.w.div_(4)
