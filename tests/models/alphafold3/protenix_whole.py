"""A small complex and drawn weights, the same for Protenix and for us.

Where Protenix is installed, ``python protenix_whole.py`` writes ``protenix_whole.npz``: what
Protenix predicts for them, in float64, its float32 parts included, with all that it drew.
"""

import os
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

GOLDEN = Path(__file__).with_suffix(".npz")
WIDE = torch.float64
ATOMS_OF_TOKEN = (3, 1, 4, 5, 9, 2, 6, 5, 3, 5, 8, 9)
ROWS, TEMPLATES, CYCLES, STEPS, COPIES = 5, 2, 2, 4, 2
SINGLE, PAIR, TOKEN, ATOM, ATOM_PAIR, DIFFUSION = 32, 16, 16, 16, 8, 64
BLOCKS = 2
"""Of the trunk and of the diffusion; one of the confidences, of templates and of atoms."""
SCORES = ("plddt", "ptm", "iptm", "ranking_score", "has_clash", "chain_ptm")


def weight(name, shape):
    """Draw a weight by its name in Protenix."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        return torch.from_numpy(drawn / shape[-1] ** 0.5)
    return torch.from_numpy(0.1 * drawn + name.endswith("weight"))


def rounded_atan(x):
    """Return the arc tangent in float32, rounded from float64: that of float32 varies by CPU."""
    return torch.from_numpy(np.arctan(x.numpy().astype(np.float64)).astype(np.float32))


def batch():
    """Two chains of six tokens, as the model takes them."""
    draw = np.random.default_rng(0)
    count = torch.tensor(ATOMS_OF_TOKEN)
    N, A, S, T = len(count), int(count.sum()), ROWS, TEMPLATES
    token = torch.arange(N)
    of = token.repeat_interleave(count)

    def normal(*shape):
        return torch.from_numpy(draw.standard_normal(shape))

    def classes(most, *shape):
        return torch.from_numpy(draw.integers(most, size=shape))

    msa, deletion = classes(32, S, N), classes(9, S, N)
    chain = 1 + token // 6
    return {
        "ref_pos": normal(A, 3),
        "ref_charge": classes(3, A).to(WIDE) - 1,
        "ref_mask": classes(10, A) > 0,
        "ref_element": classes(128, A),
        "ref_atom_name_chars": classes(64, A, 4),
        "ref_space_uid": of // 2,
        "atom_to_token": of,
        "atom_mask": torch.ones(A, dtype=torch.bool),
        "token_mask": torch.ones(N, dtype=torch.bool),
        "representative_atom": count.cumsum(0) - 1,
        "asym_id": chain,
        "entity_id": torch.ones(N, dtype=torch.int64),
        "sym_id": chain,
        "residue_index": token % 6,
        "token_index": token,
        "token_bonds": torch.tensor([[1, 2], [3, 0], [-1, -1]]),
        "restype": msa[0],
        "profile": F.one_hot(msa, 32).to(WIDE).mean(0),
        "deletion_mean": deletion.to(WIDE).mean(0),
        "msa": msa.to(torch.int8),
        "deletion": deletion.to(torch.uint8),
        "msa_mask": torch.ones(S, N, dtype=torch.bool),
        "template_restype": classes(32, T, N).to(torch.int8),
        "template_pseudo_beta": 8 * normal(T, N, 3),
        "template_pseudo_beta_mask": classes(5, T, N) > 0,
        "template_backbone": 3 * normal(T, N, 3, 3),
        "template_backbone_mask": classes(5, T, N) > 0,
        "has_frame": classes(3, N) > 0,
        "molecule_type": torch.zeros(N, dtype=torch.int64),
    }


def configuration():
    """Return Protenix's own settings at these sizes."""
    from configs.configs_base import configs
    from protenix.config import parse_configs

    rows = dict.fromkeys(("train", "test"), ROWS)
    msa = {"enable": True, "strategy": "topk", "sample_cutoff": rows, "min_size": rows}
    found = parse_configs({**configs, "data": {"msa": msa}}, fill_required_with_null=True)
    model = found.model
    widths = {
        "c_s": SINGLE,
        "c_z": PAIR,
        "c_s_inputs": TOKEN + 65,
        "c_atom": ATOM,
        "c_atompair": ATOM_PAIR,
    }
    for part in (found, *model.values()):
        for name, width in widths.items():
            if hasattr(part, name):
                part[name] = width
    found.c_token = model.input_embedder.c_token = TOKEN
    model.diffusion_module.c_token = DIFFUSION
    model.constraint_embedder.c_constraint_z = PAIR
    for part in (model.pairformer, model.msa_module, model.diffusion_module.transformer):
        part.n_blocks = BLOCKS
    diffusion = model.diffusion_module
    for part in (model.template_embedder, model.confidence_head, diffusion.atom_encoder):
        part.n_blocks = 1
    diffusion.atom_decoder.n_blocks = 1
    model.N_cycle = CYCLES
    found.sample_diffusion.N_step, found.sample_diffusion.N_sample = STEPS, COPIES
    found.triangle_multiplicative = found.triangle_attention = "torch"
    return found


def features():
    """Return the complex as Protenix takes it."""
    from bevatron.models.alphafold3.templates import template_pairs

    ours = batch()
    count = torch.tensor(ATOMS_OF_TOKEN)
    N, A, first = len(count), int(count.sum()), count.cumsum(0) - count
    bonds = torch.zeros(N, N)
    for a, b in ours["token_bonds"][:2]:
        bonds[a, b] = bonds[b, a] = 1.0
    template = {name: x for name, x in ours.items() if name.startswith("template_")}
    names = ("pseudo_beta", "pseudo_beta_mask", "backbone", "backbone_mask")
    pairs = template_pairs(*(template[f"template_{name}"] for name in names), WIDE)
    representative = torch.zeros(A).index_fill(0, ours["representative_atom"], 1.0)
    deletion = ours["deletion"].type(torch.float32)  # as its pipeline computes features
    same = "ref_pos ref_charge ref_space_uid profile deletion_mean asym_id entity_id sym_id"
    return {
        **{name: ours[name] for name in f"{same} residue_index token_index".split()},
        "atom_to_token_idx": ours["atom_to_token"],
        "atom_to_tokatom_idx": torch.arange(A) - first[ours["atom_to_token"]],
        "ref_mask": ours["ref_mask"].to(WIDE),
        "ref_element": F.one_hot(ours["ref_element"], 128).to(WIDE),
        "ref_atom_name_chars": F.one_hot(ours["ref_atom_name_chars"], 64).to(WIDE),
        "restype": F.one_hot(ours["restype"], 32).to(WIDE),
        "token_bonds": bonds,
        "msa": ours["msa"].long(),
        "has_deletion": (deletion > 0).to(WIDE),
        "deletion_value": (rounded_atan(deletion / 3) * (2 / np.pi)).double(),
        "template_aatype": ours["template_restype"].long(),
        "template_distogram": pairs.distance,
        "template_pseudo_beta_mask": pairs.distance_mask.to(WIDE),
        "template_unit_vector": pairs.direction,
        "template_backbone_frame_mask": pairs.frame_mask.to(WIDE),
        **{
            f"{name}_rep_atom_mask": representative
            for name in ("distogram", "pae", "plddt_m")
        },
        "has_frame": ours["has_frame"],
        "frame_atom_index": first[:, None].expand(N, 3),
        "is_ligand": torch.zeros(A),
    }  # fmt: skip


def main():
    """Run Protenix and write what it found."""
    os.environ["LAYERNORM_TYPE"] = "torch"
    torch.set_default_dtype(WIDE)
    of_type, narrow = torch.Tensor.to, torch.float32
    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.to = lambda x, *given, **named: of_type(
        x,
        *(WIDE if one is narrow else one for one in given),
        **{name: WIDE if one is narrow else one for name, one in named.items()},
    )
    from protenix.model import utils
    from protenix.model.protenix import Protenix

    model = Protenix(configuration()).eval().double()
    fixed = {"confidence_head.lower_bins", "confidence_head.upper_bins"}
    stored = model.state_dict()
    model.load_state_dict(
        {k: v if k in fixed else weight(k, tuple(v.shape)) for k, v in stored.items()}
    )
    normals, rotations, trunk = [], [], []
    normal, rotation, output = torch.randn, utils.uniform_random_rotation, model.confidence_head

    def drawn_normal(*given, **named):
        normals.append(normal(*given, **named))
        return normals[-1]

    def drawn_rotation(**named):
        rotations.append(rotation(**named).to(WIDE))
        return rotations[-1]

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  it draws rotations from it
    torch.randn, utils.uniform_random_rotation = drawn_normal, drawn_rotation
    output.register_forward_pre_hook(
        lambda _, given, named: trunk.extend(
            named[name].clone() for name in ("s_inputs", "s_trunk", "z_trunk")
        ),
        with_kwargs=True,
    )
    with torch.no_grad():
        found, _, _ = model(features(), None, None, mc_dropout_apply_rate=0.0)
        logits = model.distogram_head(trunk[2])
    kept = {name: found[name] for name in ("coordinate", "plddt", "pae", "pde", "resolved")}
    kept |= dict(zip(("s_inputs", "s", "z"), trunk, strict=True)) | {"distogram": logits}
    scores = found["summary_confidence"]
    for name in SCORES:
        values = [torch.as_tensor(each[name], dtype=WIDE) for each in scores]
        kept[f"score_{name}"] = torch.stack(values)
    kept |= {"start": normals[0], "rotation": torch.stack(rotations)}
    kept |= {"translation": torch.stack(normals[1::2]), "noise": torch.stack(normals[2::2])}
    names = np.array([f"{name} {tuple(value.shape)}" for name, value in stored.items()])
    np.savez_compressed(GOLDEN, names=names, **{name: x.numpy() for name, x in kept.items()})


if __name__ == "__main__":
    main()
