"""Compare MACE with mace-torch on random weights, both ways, in float64: ``make parity``.

Builds ``.venv-parity`` (mace-torch 0.3.16, e3nn 0.4.4 and this package) unless it is there, goes on
in it and compares with mace-torch (`parity_mace_peer.py`), for every case,

- ours exported, evaluated by mace-torch, against ours;
- mace-torch's own random model, converted, against mace-torch;
- the same rounded to float32, as checkpoints are, and used in float64;

energies, forces, stress, virials, energies of atoms, five losses and the norm of every parameter's
gradient through the second derivative. The result goes to ``benchmarks/results``; checkpoint and
values of the case `GOLDEN` go to ``tests/parity``, where a test compares with them.
"""

import argparse
import datetime as dt
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bevatron.data.neighbours import neighbour_list
from bevatron.data.samples import collate_structures
from bevatron.files import write_json_atomically, write_text_atomically
from bevatron.models.mace import (
    MACE,
    LossConfig,
    MaceConfig,
    MaceTask,
    from_mace_torch,
    load_mace_torch_file,
    save_mace_torch_file,
    to_mace_torch,
)
from bevatron.models.mace.mace_torch_layout import pieces

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common.report import make_room

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mace-torch==0.3.16", "e3nn==0.4.4")
R_MAX = 3.5
TWO_HEADS = {
    "heads": ("first", "second"),
    "atomic_energies": ((-1.0, -2.0, -3.0, -4.0), (-1.5, -2.5, -3.5, -4.5)),
    "scale": (0.9, 1.7),
    "shift": (0.05, -0.1),
}
CASES = {
    "agnostic": {},
    "residual": {"interaction_first": "residual"},
    "agnostic_everywhere": {"interaction": "agnostic"},
    "density": {"interaction_first": "density", "interaction": "density_residual"},
    "density_residual_first": {"interaction_first": "density_residual", "interaction": "density"},
    "agnesi": {"distance_transform": "agnesi"},
    "zbl": {"pair_repulsion": True},
    "cutoff_after_mlp": {
        "apply_cutoff": False,
        "interaction_first": "density",
        "interaction": "density_residual",
    },
    "two_heads": TWO_HEADS,
    "hidden_L0": {"max_L": 0, "l_max": 3, "correlation": 3},
    "hidden_L2": {"max_L": 2, "l_max": 3, "correlation": 3},
    "hidden_L3": {"max_L": 3, "l_max": 3, "correlation": 2, "interaction_first": "residual"},
    "l_max_4": {"max_L": 2, "l_max": 4, "correlation": 2},
    "l_max_1": {"max_L": 1, "l_max": 1, "correlation": 3},
    "correlation_1": {"correlation": 1},
    "correlation_4": {"correlation": 4, "l_max": 2},
    "correlation_4_l_max_3": {"correlation": 4, "l_max": 3, "max_L": 0, "num_interactions": 1},
    "one_layer": {"num_interactions": 1},
    "three_layers": {"num_interactions": 3, "interaction_first": "residual"},
    "plain": {"scale_shift": False, "scale": (1.0,), "shift": (0.0,)},
    "like_mp_0b2": {
        "max_L": 1,
        "l_max": 3,
        "correlation": 3,
        "interaction_first": "density",
        "interaction": "density_residual",
        "distance_transform": "agnesi",
        "pair_repulsion": True,
        **TWO_HEADS,
    },
}
CASES["zbl_density_agnesi_three_layers"] = {
    **CASES["like_mp_0b2"],
    "num_channels": 4,
    "l_max": 2,
    "correlation": 2,
    "num_interactions": 3,
    "num_bessel": 5,
    "radial_mlp": (8, 8),
    "readout_width": 4,
}
GOLDEN = "zbl_density_agnesi_three_layers"
GOLDEN_FILES = ROOT / "tests" / "parity" / GOLDEN

EXPORTED = ("residual", "like_mp_0b2", "plain")
"""Cases that also go through a ``.model`` file, written and read by us beside mace-torch."""

LOSSES = {
    "weighted": LossConfig("weighted", 1.0, 10.0, 5.0),
    "huber": LossConfig("huber", 1.0, 10.0, 5.0),
    "universal": LossConfig("universal", 1.0, 10.0, 5.0),
    "l1l2": LossConfig("l1l2", 1.0, 10.0),
    "virials": LossConfig("weighted", 1.0, 10.0, 0.0, 5.0),
}
UNWEIGHTED = ("huber", "l1l2")
"""Losses of mace-torch that leave the weights of structures out; ours do not."""


def config_of(changes):
    """Return the configuration of a case."""
    values = {
        "num_channels": 8,
        "max_L": 1,
        "l_max": 2,
        "correlation": 2,
        "r_max": R_MAX,
        "num_bessel": 6,
        "radial_mlp": (16, 16),
        "readout_width": 8,
        "avg_num_neighbors": 7.5,
        "atomic_numbers": (1, 6, 8, 29),
        "atomic_energies": ((-1.0, -2.0, -3.0, -4.0),),
        "scale": (0.9,),
        "shift": (0.05,),
    }
    return MaceConfig(**{**values, **changes})


def make_structures(weighted):
    """Molecules, small and skewed crystals, a slab and an isolated atom, with random labels."""
    rng = np.random.default_rng(1)
    skew = [[3.1, 0.0, 0.2], [0.4, 2.9, 0.0], [0.0, -0.3, 3.4]]
    cases = [
        (5, np.eye(3) * 9.0, (False, False, False), 2.6),
        (3, np.array(skew), (True, True, True), 2.6),
        (1, np.eye(3) * 2.6, (True, True, True), 0.1),
        (4, np.diag([3.0, 3.5, 14.0]), (True, True, False), 2.4),
        (1, np.eye(3) * 9.0, (False, False, False), 0.1),
        (9, np.eye(3) * 4.5, (True, True, True), 4.3),
    ]
    structures = []
    for number, (n, cell, pbc, side) in enumerate(cases):
        stress = rng.normal(0, 0.05, (3, 3))
        structures.append(
            {
                "numbers": rng.choice([1, 6, 8, 29], n).tolist(),
                "positions": spread(rng, n, side, cell, pbc).tolist(),
                "cell": cell.tolist(),
                "pbc": list(pbc),
                "head": number % 2,
                "energy": float(rng.normal(-3 * n, 1)),
                "forces": rng.normal(
                    0, [[1.0], [150.0], [250.0], [400.0]][number % 4], (n, 3)
                ).tolist(),
                "stress": (stress + stress.T).tolist(),
                "weights": rng.uniform(0.5, 2.0, 4).tolist() if weighted else [1.0] * 4,
                # mace-torch's stress of open axes refers to a volume of its own.
                "labelled": all(pbc),
            }
        )
    return structures


def spread(rng, n, side, cell, pbc):
    """Random places with all distances above 0.9 Å, images included."""
    while True:
        positions = rng.uniform(0, side, (n, 3))
        edges, _ = neighbour_list(positions, cell, np.array(pbc), 0.9)
        if not len(edges):
            return positions


def batch_of(structures, config):
    """Collate structures with our own neighbour lists."""
    samples = []
    for s in structures:
        geometry = (np.array(s[name]) for name in ("positions", "cell", "pbc"))
        edges, shifts = neighbour_list(*geometry, config.r_max)
        samples.append(
            {
                "atomic_numbers": np.array(s["numbers"], dtype=np.int32),
                "positions": np.array(s["positions"]),
                "cell": np.array(s["cell"]),
                "pbc": np.array(s["pbc"]),
                "energy": np.float64(s["energy"]),
                "forces": np.array(s["forces"]),
                "stress": np.array(s["stress"]),
                "weights": np.array(s["weights"]),
                "head": np.int32(s["head"] % config.num_heads),
                "edges": edges,
                "edge_shifts": shifts,
            }
        )
    return collate_structures(samples, np.arange(len(samples)), [1.0] * len(samples))


def evaluate(model, structures):
    """Compute what mace-torch's side computes."""
    compute = ("energy", "forces", "stress", "virials", "node_energy")
    found = {"structures": [], "losses": {}}
    for structure in structures:
        out = model(batch_of([structure], model.config), compute=compute)
        found["structures"].append({name: out[name].detach().tolist() for name in compute})
    labelled = [s for s in structures if s["labelled"]]
    for name, loss in LOSSES.items():
        ones = [{**s, "weights": [1.0] * 4} for s in labelled]
        # mace-torch's universal loss knows the weights of labels, not that of the structure.
        labels = [{**s, "weights": [1.0, *s["weights"][1:]]} for s in labelled]
        chosen = ones if name in UNWEIGHTED else labels if name == "universal" else labelled
        if name == "l1l2":
            chosen = labelled
        batch, task = batch_of(chosen, model.config), MaceTask(loss, model.config.heads)
        if name == "l1l2":
            # Its energies are weighted, its forces are not.
            batch = unweighted_forces(batch)
        model.zero_grad()
        value = task.loss(model, batch, task.normalisers(batch)).total
        value.backward()
        found["losses"][name] = {"value": float(value.detach()), "gradients": their_norms(model)}
    return found


def unweighted_forces(batch):
    """Set the weights of forces to one."""
    import dataclasses

    return dataclasses.replace(batch, forces_weight=torch.ones_like(batch.forces_weight))


def their_norms(model):
    """Norms of the gradients, collected into mace-torch's tensors."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    squares = {}
    for piece in pieces(model.config):
        if piece.ours in gradients:
            square = float(gradients[piece.ours].square().sum())
            squares[piece.theirs] = squares.get(piece.theirs, 0.0) + square
    return {name: value**0.5 for name, value in squares.items()}


def compare(ours, theirs):
    """Return the largest differences; those of losses and gradients are relative."""
    worst = dict.fromkeys(("energy", "node_energy", "forces", "stress", "virials"), 0.0)
    for a, b in zip(ours["structures"], theirs["structures"], strict=True):
        periodic = np.any(b["stress"])
        for name in worst:
            if name == "stress" and not np.any(a["stress"]) and periodic:
                # Without periodic axes ours is zero; mace-torch's refers to an invented cell.
                continue
            difference = np.abs(np.array(a[name]) - np.array(b[name])).max()
            worst[name] = max(worst[name], float(difference))
    worst["loss"] = worst["gradient"] = 0.0
    for name, mine in ours["losses"].items():
        other = theirs["losses"][name]
        worst["loss"] = max(worst["loss"], abs(mine["value"] / other["value"] - 1))
        largest = max(other["gradients"].values())
        if mine["gradients"].keys() < other["gradients"].keys():
            missing = other["gradients"].keys() - mine["gradients"].keys()
            raise SystemExit(f"no gradient of {min(missing)}")
        for key, norm in other["gradients"].items():
            relative = abs(mine["gradients"][key] - norm) / max(norm, 1e-6 * largest)
            worst["gradient"] = max(worst["gradient"], relative)
    return worst


LIMITS = {
    "energy": 1e-9,
    "node_energy": 1e-9,
    "forces": 1e-9,
    "stress": 1e-10,
    "virials": 1e-8,
    "loss": 1e-9,
    "gradient": 1e-8,
}


def environment():
    """Return the Python of the environment that has mace-torch; build it if need be."""
    folder = ROOT / ".venv-parity"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"building {folder.name} with {', '.join(PACKAGES)} ...", flush=True)
        venv.create(folder, with_pip=True)
    check = [str(python), "-c", "import mace, e3nn, bevatron.models.mace"]
    if subprocess.run(check, capture_output=True, check=False).returncode:
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, *PACKAGES, "-e", str(ROOT)], check=True)
    return str(python)


def run(names):
    """Compare all cases; return rows of (case, direction, differences)."""
    import parity_mace_peer as peer

    peer.begin()
    structures, rows = make_structures(weighted=True), []
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        model = MACE(config_of(CASES[name]), torch.float64)
        mine = evaluate(model, structures)
        state, config = to_mace_torch(model)
        found = peer.run(config, state, structures, seed)
        rows.append((name, "ours in mace-torch", compare(mine, found.ours)))
        if name in EXPORTED:
            values = exported(name, state, config, structures)
            rows.append((name, "ours as .model", compare(mine, values)))
        theirs = evaluate(from_mace_torch(found.state, found.config), structures)
        rows.append((name, "mace-torch's in ours", compare(theirs, found.theirs)))
        single = evaluate(from_mace_torch(found.rounded, found.config).double(), structures)
        rows.append((name, "float32 used in float64", compare(single, found.single)))
        if name == GOLDEN:
            write_golden(found.rounded, found.config, found.single)
    return rows


def exported(name, state, config, structures):
    """Write and read a ``.model`` file; return what mace-torch computes with it."""
    import parity_mace_peer as peer

    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        path = Path(scratch) / "ours.model"
        save_mace_torch_file(from_mace_torch(state, config), path)
        again, _ = to_mace_torch(load_mace_torch_file(path, trust=True))
        wrong = [key for key, value in state.items() if not torch.equal(value, again[key])]
        if wrong:
            raise SystemExit(f"{name}: {wrong[0]} changed by writing and reading a .model file")
        return peer.of_file(path, structures, config)


def write_golden(state, config, values):
    """Write a checkpoint in float32 and what mace-torch computes with it in float64."""
    save_file({k: v.contiguous() for k, v in state.items()}, f"{GOLDEN_FILES}.safetensors")
    golden = {"against": list(PACKAGES), "config": config, **values}
    write_text_atomically(GOLDEN_FILES.with_suffix(".json"), json.dumps(golden) + "\n")


def report(rows):
    """Write the result as JSON and as a table; return whether all is within limits."""
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    path = make_room("mace/parity", None, today)
    fine = all(worst[name] <= limit for _, _, worst in rows for name, limit in LIMITS.items())
    values = {
        "against": list(PACKAGES),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": today,
        "limits": LIMITS,
        "passed": fine,
        "cases": [{"case": c, "direction": d, "largest_differences": w} for c, d, w in rows],
    }
    write_json_atomically(path, values)
    names = list(LIMITS)
    lines = [
        f"# MACE against mace-torch, {today}",
        "",
        f"{', '.join(PACKAGES)}, torch {torch.__version__}, float64 on a CPU, random weights,",
        "both ways (`make parity`). Largest differences over six structures (molecule, three",
        "crystals, slab, isolated atom): energies and virials in eV, forces in eV/Å, stress in",
        "eV/Å^3; losses (weighted, huber, universal, l1l2, virials) and gradient norms of all",
        "parameters relative.",
        "",
        "| case | direction | " + " | ".join(names) + " |",
        "|---" * (2 + len(names)) + "|",
        "| limit | | " + " | ".join(f"{LIMITS[name]:.0e}" for name in names) + " |",
    ]
    lines += [
        f"| {case} | {direction} | " + " | ".join(f"{worst[name]:.1e}" for name in names) + " |"
        for case, direction, worst in rows
    ]
    write_text_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--no-report", action="store_true", help="print only")
    args = parser.parse_args()
    if importlib.util.find_spec("mace") is None:
        python = environment()
        os.execv(python, [python, *sys.argv])
    torch.set_num_threads(1)
    rows = run(args.cases or list(CASES))
    if args.no_report:
        for row in rows:
            print(row)
        return
    sys.exit(0 if report(rows) else 1)


if __name__ == "__main__":
    main()
