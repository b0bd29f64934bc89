"""Times a training step of Protenix on a GPU: its own model, loss and settings, on a random crop.

    python -m benchmarks.alphafold3.protenix [--tokens 384] [--arms ...] [--out rows]

Its package and what its model imports have to be there: optree, ml_collections, scipy, RDKit. The
crop has the sizes of those of `benchmarks.alphafold3.train_step`, whose ``--collect`` joins the
rows. It lies on the GPU and its labels have no alternatives, so loader and permutations are left
out, in Protenix's favour; and so are averaged weights. Its layer norm, PyTorch's or its own of
CUDA, is selected at import: one kind a call.
"""

import argparse
import json
import os
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.alphafold3.train_step import PROTENIX
from benchmarks.common.arguments import add_after, add_rows, script_parser, wait_for
from benchmarks.common.arms import GIB, OUT_OF_MEMORY, free, or_out_of_memory
from benchmarks.common.report import hardware, versions
from torch import Tensor

ATOMS = 20 / 3
"""Of a token: 2,560 of 384."""
CLASSES, ELEMENTS, LETTERS = 32, 128, 64
Features = dict[str, Tensor]


class Unpermuted:
    """Labels without alternatives, in place of Protenix's search for the best."""

    def permute_label_to_match_mini_rollout(
        self, _coordinates: Tensor, _features: Features, label: Features, _whole: Features
    ) -> tuple[Features, dict[str, Any]]:
        """Keep the label."""
        return label, {}

    def permute_diffusion_sample_to_match_label(
        self, _features: Features, predicted: Features, _label: Features, stage: str
    ) -> tuple[Features, dict[str, Any], None, None]:
        """Keep the copies."""
        del stage
        return predicted, {}, None, None


def configuration(arm: str, given: argparse.Namespace) -> Any:
    """Return Protenix's own settings, with one pass, all rows and the kernels of an arm."""
    from configs.configs_base import configs
    from protenix.config import parse_configs

    rows = {"train": given.rows, "test": given.rows}
    msa = {"enable": True, "strategy": "topk", "sample_cutoff": rows, "min_size": rows}
    found = parse_configs({**configs, "data": {"msa": msa}}, fill_required_with_null=True)
    found.triangle_multiplicative, found.triangle_attention, _ = PROTENIX[arm]
    found.model.N_cycle, found.diffusion_batch_size = 1, given.copies
    if given.blocks is not None:
        found.model.pairformer.n_blocks = found.model.msa_module.n_blocks = given.blocks
        found.model.diffusion_module.transformer.n_blocks = given.blocks
    return found


def crop(tokens: int, rows: int) -> tuple[Features, Features]:
    """Draw features and labels of a protein of so many tokens."""
    N, A = tokens, int(tokens * ATOMS)
    torch.manual_seed(0)
    token = torch.arange(A) * N // A
    first = torch.searchsorted(token, torch.arange(N))
    place, position = torch.arange(N), 10 * torch.randn(A, 3)
    one = torch.ones(A)
    representative = torch.zeros(A).index_fill(0, first, 1.0)
    msa = torch.randint(CLASSES, (rows, N))
    profile = F.one_hot(msa, CLASSES).float().mean(0)
    features = {
        "atom_to_token_idx": token, "atom_to_tokatom_idx": torch.arange(A) - first[token],
        "ref_pos": torch.randn(A, 3), "ref_charge": torch.zeros(A), "ref_mask": one,
        "ref_element": F.one_hot(torch.randint(ELEMENTS, (A,)), ELEMENTS).float(),
        "ref_atom_name_chars": F.one_hot(torch.randint(LETTERS, (A, 4)), LETTERS).float(),
        "ref_space_uid": token, "restype": F.one_hot(msa[0], CLASSES).float(),
        "profile": profile, "deletion_mean": torch.rand(N), "asym_id": place * 2 // N,
        "residue_index": place % (N // 2), "entity_id": 0 * place, "token_index": place,
        "sym_id": place * 2 // N, "token_bonds": torch.zeros(N, N), "msa": msa,
        "has_deletion": torch.zeros(rows, N), "deletion_value": torch.zeros(rows, N),
        "is_protein": one, "is_ligand": 0 * one, "is_dna": 0 * one, "is_rna": 0 * one,
        "distogram_rep_atom_mask": representative, "pae_rep_atom_mask": representative,
        "plddt_m_rep_atom_mask": representative, "has_frame": torch.ones(N),
        "frame_atom_index": first[:, None] + torch.arange(3),
        "bond_mask": torch.zeros(A, A), "resolution": torch.tensor([2.0]),
    }  # fmt: skip
    return features, {"coordinate": position, "coordinate_mask": one.long()}


def measure(arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """Time steps of an arm."""
    from protenix.model.loss import ProtenixLoss
    from protenix.model.protenix import Protenix
    from protenix.utils.torch_utils import autocasting_disable_decorator

    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    config = configuration(arm, given)
    model = Protenix(config).train().to(device)  # draws with a generator of the CPU
    loss_of = ProtenixLoss(config)
    optimiser = torch.optim.Adam(
        model.parameters(), config.lr, (config.adam.beta1, config.adam.beta2)
    )
    features, label = (
        {name: x.to(device) for name, x in part.items()} for part in crop(given.tokens, given.rows)
    )
    # In the settings that it trains with: what is kept in float32 takes itself out of autocast.
    amp = torch.autocast(device.type, torch.bfloat16, cache_enabled=False, enabled=on_gpu)
    row: dict[str, Any] = {"N": given.tokens, "atoms": len(features["ref_pos"]), "arm": arm}

    def step() -> None:
        with amp:
            predicted, found, _ = model(
                dict(features), dict(label), dict(label), mode="train",
                current_step=0, symmetric_permutation=Unpermuted(),
            )  # fmt: skip
            loss, _ = autocasting_disable_decorator(config.skip_amp.loss)(loss_of)(
                feat_dict=features, pred_dict=predicted, label_dict=found, mode="train"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip_norm)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        row["loss"] = float(loss.detach())  # it is logged in every step

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if or_out_of_memory(lambda: [step(), step()]) is None:
        return {**row, "s/step": OUT_OF_MEMORY}
    if on_gpu:
        state = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
        row["peak GiB"] = (torch.cuda.max_memory_allocated() - state) / GIB
    print(f"{arm}, N = {given.tokens}: ready", flush=True)
    wait_for(given.after)
    seconds: list[float] = []
    while len(seconds) < given.steps and sum(seconds) < given.seconds:
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    row |= {"steps": len(seconds), "s/step": float(np.mean(seconds))}
    row |= {"median s": float(np.median(seconds)), "deviation s": float(np.std(seconds))}
    print(f"{arm}, N = {given.tokens}: measured", flush=True)
    return row


def main() -> None:
    """Measure arms and keep the row of each."""
    parser = script_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--arms", nargs="*", choices=[*PROTENIX], default=[*PROTENIX][:3])
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--blocks", type=int, help="of every stack; as published by default")
    parser.add_argument("--steps", type=int, default=20, help="at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="after which none begins")
    add_after(parser)
    parser.add_argument("--device", default="cuda")
    add_rows(parser, "alphafold3-rows")
    given = parser.parse_args()
    norms = {PROTENIX[arm][2] for arm in given.arms}
    if len(norms) > 1:
        raise SystemExit("--arms: layer norms of one kind in a call, its import selects them")
    os.environ["LAYERNORM_TYPE"] = norms.pop()  # its own is compiled by nvcc
    measured_on = {"hardware": hardware(given.device), "versions": versions()}
    given.out.mkdir(parents=True, exist_ok=True)
    for arm in given.arms:
        row = measure(arm, given)
        print(row, flush=True)
        name = "-".join([str(given.tokens), *arm.replace(",", "").split()])
        found = {"measured on": measured_on, "row": row}
        (given.out / f"step-{name}.json").write_text(json.dumps(found))
        free()


if __name__ == "__main__":
    main()
