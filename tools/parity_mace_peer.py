"""The mace-torch side of `parity_mace.py`.

mace must be imported before e3nn.o3, whose import needs what mace sets.
"""

import json
import logging
import time
import warnings
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class Found(NamedTuple):
    """What mace-torch computes with our weights, its own, and these rounded to float32.

    ``state`` and ``rounded`` are its own weights, ``config`` describes their model.
    """

    ours: dict[str, Any]
    theirs: dict[str, Any]
    single: dict[str, Any]
    state: dict[str, torch.Tensor]
    rounded: dict[str, torch.Tensor]
    config: dict[str, Any]


def begin():
    """Silence mace-torch, and say which it is."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    # Compiling every module costs more than all evaluations of these small models.
    e3nn.set_optimization_defaults(jit_script_fx=False)
    print(f"  mace-torch {mace.__version__}, e3nn {e3nn.__version__}", flush=True)


@contextmanager
def in_double():
    """Make float64 the default type, as mace-torch's own programs do."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@in_double()
def run(config, weights, structures, seed):
    """Evaluate one case."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    model = build(config)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    named = json.loads(json.dumps(written_config(model, config), default=plain))
    theirs = evaluate(model, structures, config)
    rounded = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    # But for the couplings of messages, which are exact on our side.
    model.load_state_dict({k: v for k, v in rounded.items() if "_w3j" not in k}, strict=False)
    single = evaluate(model, structures, config)
    model.load_state_dict(weights, strict=True)
    ours = evaluate(model, structures, config)
    print(f"  mace-torch: {time.perf_counter() - start:.1f} s", flush=True)
    return Found(ours, theirs, single, state, rounded, named)


@in_double()
def of_file(path, structures, config):
    """Evaluate a ``.model`` file; it is ours, so it may be unpickled."""
    return evaluate(torch.load(path, weights_only=False), structures, config)
