"""Pictures of a predicted chain with the known one."""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bevatron.data.proteins.chain_batch import ChainBatch
from bevatron.data.proteins.constants import CA
from bevatron.maths.superposition import superposed
from bevatron.models.common.folding.metrics import expected_lddt, lddt
from bevatron.train.report.plots.style import PALETTE, legend_below, new_axes


def picture_of(name: str, batch: ChainBatch, outputs: Mapping[str, Tensor]) -> Figure:
    """Draw the lDDT and pLDDT of every residue, and both chains superposed.

    Parameters
    ----------
    batch, outputs : a chain and its prediction, as `ChainMetrics.update` takes them
    """
    given = batch.tensors()
    known = given["all_atom_mask"][:, CA].bool() & given["seq_mask"]
    true, found = given["all_atom_positions"][:, CA], outputs["final_atom_positions"][:, CA]
    residue = torch.arange(len(true), device=true.device)
    kept, counted = lddt(found, true, known, residue)
    kept, expected = 100 * kept / counted, expected_lddt(outputs["lddt_logits"])
    moved = superposed(found, true, known.to(true.dtype))
    with new_axes(9.2, 3.6, 1, 2) as (figure, ((left, right),)):
        number = given["residue_index"][known].cpu() + 1
        left.plot(number, kept[known].cpu(), color=PALETTE[0], label="lDDT of CA atoms")
        left.plot(number, expected[known].cpu(), "--", color=PALETTE[1], label="expected (pLDDT)")
        left.set(xlabel="residue", ylabel="lDDT", ylim=(0, 100), title=name)
        # Where the known chain is widest: its two longest principal axes.
        centre = true[known].mean(0)
        axes = torch.linalg.svd((true[known] - centre).double(), full_matrices=False).Vh[:2].mT
        for chain, colour, label in ((true, PALETTE[6], "known"), (moved, PALETTE[0], "predicted")):
            x, y = ((chain[known] - centre).double() @ axes).mT.cpu()
            right.plot(x, y, color=colour, label=label)
        right.set(xlabel="Å", ylabel="Å", title="CA atoms, superposed", aspect="equal")
        for ax in (left, right):
            legend_below(ax)
    return figure
