"""mace-torch for benchmarks/mace/train_step.py, with e3nn or with cuEquivariance's kernels."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from mace import data, modules
from mace.cli.convert_e3nn_cueq import run as to_cueq
from mace.tools import AtomicNumberTable
from mace.tools.torch_geometric.dataloader import DataLoader

from bevatron.models.mace import MACE, to_mace_torch
from bevatron.models.mace.mace_torch_file import build_mace_torch
from bevatron.train.settings import OptimConfig


def peer(
    kind: str, model: MACE, structures: list[Any], optim: OptimConfig
) -> tuple[str, Callable[[], torch.Tensor], Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Build the same model in mace-torch and return (name, training step, inference)."""
    torch.set_default_dtype(torch.float32)
    state, config = to_mace_torch(model)
    theirs = build_mace_torch(config, torch.float32)
    theirs.load_state_dict(state)
    theirs = theirs.to("cuda")
    if kind == "cueq":
        theirs = to_cueq(theirs, device="cuda", return_model=True).to("cuda")
    batch = _batch(structures, model).to("cuda")
    loss_fn = modules.WeightedEnergyForcesLoss(energy_weight=1.0, forces_weight=100.0).to("cuda")
    optimizer = torch.optim.Adam(theirs.parameters(), lr=optim.lr, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        outputs = theirs(batch.to_dict(), training=True, compute_force=True)
        loss = loss_fn(pred=outputs, ref=batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip)
        optimizer.step()
        return loss.detach()

    frozen = copy.deepcopy(theirs).requires_grad_(requires_grad=False)  # as in its calculator

    def infer() -> tuple[torch.Tensor, torch.Tensor]:
        outputs = frozen(batch.to_dict(), training=False, compute_force=True)
        return outputs["energy"].detach(), outputs["forces"].detach()

    return f"mace-torch, {kind}", step, infer


def _batch(structures: list[Any], model: MACE) -> Any:
    """Put labelled structures into mace-torch's batch."""
    keys = data.KeySpecification(info_keys={"energy": "energy"}, arrays_keys={"forces": "forces"})
    table = AtomicNumberTable(list(model.config.atomic_numbers))
    graphs = [
        data.AtomicData.from_config(
            data.config_from_atoms(atoms, key_specification=keys),
            z_table=table,
            cutoff=model.config.r_max,
        )
        for atoms in structures
    ]
    return next(iter(DataLoader(graphs, batch_size=len(graphs))))
