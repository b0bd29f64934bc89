"""The mace-torch side of `parity_mace.py`: runs in the environment that has mace-torch.

    python tools/parity_mace_peer.py FOLDER

For every case of FOLDER/cases.json: build mace-torch's model from ``CASE/config.json``, once with
the weights of ``CASE/ours.pt`` and once with random weights of its own, which it writes to
``CASE/theirs.pt`` with ``CASE/theirs.json``, and rounded to float32 to ``CASE/single.pt``. What all
of them compute goes to ``CASE/results.json``.
mace must be imported before e3nn.o3, whose import needs what mace sets.
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path

import e3nn
import mace
import numpy as np
import torch
from e3nn.o3 import Irreps
from mace import data, modules, tools
from mace.modules import loss as losses
from mace.tools.scripts_utils import extract_config_mace_model
from mace.tools.torch_geometric.batch import Batch

LOSSES = {
    "weighted": lambda: losses.WeightedEnergyForcesStressLoss(1.0, 10.0, 5.0),
    "huber": lambda: losses.WeightedHuberEnergyForcesStressLoss(1.0, 10.0, 5.0, 0.01),
    "universal": lambda: losses.UniversalLoss(1.0, 10.0, 5.0, 0.01),
    "l1l2": lambda: losses.WeightedEnergyForcesL1L2Loss(1.0, 10.0),
    "virials": lambda: losses.WeightedEnergyForcesVirialsLoss(1.0, 10.0, 5.0),
}


def build(config):
    """Build the module that a configuration in plain values describes."""
    values = dict(config)
    kind = getattr(modules, values.pop("class"))
    for name in ("interaction_cls", "interaction_cls_first"):
        values[name] = modules.interaction_classes[values[name]]
    values["gate"] = torch.nn.functional.silu
    for name in ("hidden_irreps", "MLP_irreps"):
        values[name] = Irreps(values[name])
    values["atomic_energies"] = np.array(values["atomic_energies"])
    return kind(**values)


def batch_of(structures, config):
    """Make mace's batch: its own neighbour lists, labels and weights."""
    table = tools.AtomicNumberTable(config["atomic_numbers"])
    graphs = []
    for s in structures:
        stress = np.array(s["stress"])
        volume = abs(np.linalg.det(np.array(s["cell"])))
        configuration = data.Configuration(
            atomic_numbers=np.array(s["numbers"]),
            positions=np.array(s["positions"]),
            properties={
                "energy": s["energy"],
                "forces": np.array(s["forces"]),
                "stress": stress,
                "virials": -stress * volume,
            },
            property_weights={
                "energy": s["weights"][1],
                "forces": s["weights"][2],
                "stress": s["weights"][3],
                "virials": s["weights"][3],
            },
            cell=np.array(s["cell"]),
            pbc=tuple(s["pbc"]),
            weight=s["weights"][0],
            head=config["heads"][s["head"] % len(config["heads"])],
        )
        graphs.append(
            data.AtomicData.from_config(
                configuration, z_table=table, cutoff=config["r_max"], heads=config["heads"]
            )
        )
    return Batch.from_data_list(graphs)


def evaluate(model, structures, config):
    """Compute everything that is compared."""
    found = {"structures": []}
    options = {"compute_force": True, "compute_stress": True, "compute_virials": True}
    for structure in structures:
        out = model(batch_of([structure], config).to_dict(), training=False, **options)
        names = ("energy", "forces", "stress", "virials", "node_energy")
        found["structures"].append({name: out[name].detach().tolist() for name in names})
    labelled = [s for s in structures if s["labelled"]]
    found["losses"] = {}
    for name, make in LOSSES.items():
        batch = batch_of(labelled, config)
        model.zero_grad()
        out = model(batch.to_dict(), training=True, **options)
        value = make()(pred=out, ref=batch)
        value.backward()
        norms = {
            key: float(p.grad.norm()) for key, p in model.named_parameters() if p.grad is not None
        }
        found["losses"][name] = {"value": float(value), "gradients": norms}
    return found


def plain(value):
    """Turn arrays into lists and everything else that JSON has not into text."""
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else str(value)


def written_config(model, config):
    """Return the configuration as mace-torch itself extracts it, where it can."""
    found = extract_config_mace_model(model)
    if "error" in found:
        return {**config, "avg_num_neighbors": model.interactions[0].avg_num_neighbors}
    named = {k: str(v) if isinstance(v, Irreps) else v for k, v in found.items()}
    return {**named, "class": type(model).__name__}


def run(folder, structures, seed):
    """Compare one case."""
    config = json.loads((folder / "config.json").read_text())
    start = time.perf_counter()
    torch.manual_seed(seed)
    model = build(config)
    torch.save(model.state_dict(), folder / "theirs.pt")
    (folder / "theirs.json").write_text(json.dumps(written_config(model, config), default=plain))
    results = {"theirs": evaluate(model, structures, config)}
    single = {k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    torch.save(single, folder / "single.pt")
    # But for the couplings of messages, which are exact on our side.
    model.load_state_dict({k: v for k, v in single.items() if "_w3j" not in k}, strict=False)
    results["single"] = evaluate(model, structures, config)
    model.load_state_dict(torch.load(folder / "ours.pt", weights_only=True), strict=True)
    results["ours"] = evaluate(model, structures, config)
    exported = folder / "ours.model"
    if exported.exists():
        # Written by our export for mace-torch's own tools; it is ours, so it may be unpickled.
        loaded = torch.load(exported, weights_only=False)
        results["exported"] = evaluate(loaded, structures, config)
    (folder / "results.json").write_text(json.dumps(results))
    print(f"  mace-torch: {folder.name}, {time.perf_counter() - start:.1f} s", flush=True)


def export(folder):
    """Write ``ours.model`` with our own export, which needs both packages in one environment."""
    from bevatron.models.mace import from_mace_torch, save_mace_torch_file

    state = torch.load(folder / "ours.pt", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    save_mace_torch_file(from_mace_torch(state, config), folder / "ours.model")


def reimport(folder):
    """Read ``ours.model`` with our own import and check that it is the same."""
    from bevatron.models.mace import load_mace_torch_file, to_mace_torch

    again, _ = to_mace_torch(load_mace_torch_file(folder / "ours.model", trust=True))
    state = torch.load(folder / "ours.pt", weights_only=True)
    wrong = [name for name, value in state.items() if not torch.equal(value, again[name])]
    if wrong:
        raise SystemExit(f"{folder.name}: {wrong[0]} changed by writing and reading a .model file")


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    # Compiling every module costs more than all evaluations of these small models.
    e3nn.set_optimization_defaults(jit_script_fx=False)
    torch.set_default_dtype(torch.float64)
    exchange = Path(sys.argv[1])
    print(f"  mace-torch {mace.__version__}, e3nn {e3nn.__version__}", flush=True)
    structures = json.loads((exchange / "structures.json").read_text())
    for seed, case in enumerate(json.loads((exchange / "cases.json").read_text())):
        folder = exchange / case["name"]
        if case["export"]:
            export(folder)
        run(folder, structures, seed)
        if case["export"]:
            reimport(folder)


if __name__ == "__main__":
    main()
