"""The mace-torch side of the comparison: runs where mace-torch and e3nn are installed.

    python -m benchmarks.mace.mace_torch_peer initial FOLDER DATASET SEED  first weights, settings
    python -m benchmarks.mace.mace_torch_peer learn FOLDER DATASET SEED    the whole training
    python -m benchmarks.mace.mace_torch_peer serve FOLDER DATASET         timings on request

FOLDER holds ``plan.json`` (`mace_torch_plan.write_plan`). Model, data pipeline, loss, optimiser
groups, schedule, averaged weights, training epoch and evaluation are mace-torch's own functions,
called as its command line calls them; only the order of the batches is given.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
from mace import data, modules, tools
from mace.tools import scripts_utils
from mace.tools.model_script_utils import configure_model
from mace.tools.torch_geometric.dataloader import DataLoader
from mace.tools.train import evaluate, train_one_epoch
from torch_ema import ExponentialMovingAverage

CPU = torch.device("cpu")


class Losses:
    """Takes the place of mace's log file: keeps the loss of each step."""

    def __init__(self):
        self.values = []

    def log(self, entry):
        """Take an entry as mace's logger does."""
        self.values.append(float(entry["loss"]))


class Peer:
    """One data set, one seed, one precision: what mace's ``run_train`` has before its loop."""

    def __init__(self, plan, dataset, seed, dtype):
        tools.set_default_dtype(dtype)
        self.plan, self.dataset, self.seed, self.dtype = plan, dataset, seed, dtype
        self.args = arguments(plan, seed, dtype)
        tools.set_seeds(seed)
        self.parts, table, energies = load(plan, dataset, self.args)
        batches = DataLoader(self.parts["train"], batch_size=self.args.batch_size)
        self.args.avg_num_neighbors = modules.compute_avg_num_neighbors(batches)
        self.loss_fn = scripts_utils.get_loss_fn(self.args, False, False)
        self.model, self.output_args = configure_model(
            self.args, batches, energies, heads=["Default"], z_table=table
        )
        options = scripts_utils.get_params_options(self.args, self.model)
        self.optimizer = scripts_utils.get_optimizer(self.args, options)
        self.scheduler = scripts_utils.LRScheduler(self.optimizer, self.args)
        self.ema = ExponentialMovingAverage(self.model.parameters(), decay=self.args.ema_decay)

    def epoch(self, number, batches=None, losses=None):
        """Train one epoch; return its seconds."""
        tools.set_default_dtype(self.dtype)
        batches = self.plan["batches"][str(self.seed)][number] if batches is None else batches
        start = time.perf_counter()
        train_one_epoch(
            model=self.model,
            loss_fn=self.loss_fn,
            data_loader=DataLoader(self.parts["train"], batch_sampler=batches),
            optimizer=self.optimizer,
            epoch=number,
            output_args=self.output_args,
            max_grad_norm=self.args.clip_grad,
            ema=self.ema,
            logger=losses or Losses(),
            device=CPU,
            distributed=False,
        )
        return time.perf_counter() - start

    def errors(self, part, averaged=True):
        """Evaluate a part of the data with mace's own function."""
        tools.set_default_dtype(self.dtype)
        loader = DataLoader(self.parts[part], batch_size=self.args.valid_batch_size)
        if averaged:
            with self.ema.average_parameters():
                return evaluate(self.model, self.loss_fn, loader, self.output_args, CPU)[1]
        return evaluate(self.model, self.loss_fn, loader, self.output_args, CPU)[1]

    def write_initial(self, folder):
        """Write the weights as they are now, with what a state dict does not hold."""
        torch.save(self.model.state_dict(), folder / "initial.pt")
        config = scripts_utils.extract_config_mace_model(self.model)
        config["class"] = type(self.model).__name__
        # Irreps are tuples, which JSON would spell out.
        named = {k: str(v) if type(v).__name__ == "Irreps" else v for k, v in config.items()}
        (folder / "config.json").write_text(json.dumps(named, default=plain))


def arguments(plan, seed, dtype):
    """Parse the settings as mace's command line does; what is not named has mace's default."""
    model, training = plan["architecture"], plan["training"]
    options = {
        "name": "comparison",
        "model": "MACE",
        "num_channels": model["num_channels"],
        "max_L": model["max_L"],
        "max_ell": model["l_max"],
        "correlation": model["correlation"],
        "r_max": model["r_max"],
        "num_radial_basis": model["num_bessel"],
        "num_cutoff_basis": model["polynomial_cutoff"],
        "num_interactions": model["num_interactions"],
        "interaction_first": model["interaction_first"],
        "interaction": model["interaction"],
        "scaling": "rms_forces_scaling",
        "E0s": "average",
        "loss": "weighted",
        "energy_weight": training["energy_weight"],
        "forces_weight": training["forces_weight"],
        "optimizer": "adam",
        "lr": training["lr"],
        "weight_decay": training["weight_decay"],
        "scheduler": "ExponentialLR",
        "lr_scheduler_gamma": training["gamma"],
        "ema_decay": training["ema"],
        "clip_grad": training["clip"],
        "batch_size": training["batch_size"],
        "valid_batch_size": training["batch_size"],
        "max_num_epochs": training["epochs"],
        "default_dtype": dtype,
        "device": "cpu",
        "seed": seed,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    args = tools.build_default_arg_parser().parse_args([*words, "--amsgrad", "--ema"])
    args = tools.check_args(args)[0]
    # As run_train sets them for a model of energies and forces.
    args.compute_energy = args.compute_forces = True
    args.compute_dipole = args.compute_polarizability = False
    return args


def load(plan, dataset, args):
    """Read the structures and build mace's graphs; E0 by least squares over the training part."""
    part = plan["datasets"][dataset]
    keys = data.KeySpecification.from_defaults()
    _, structures = data.load_from_xyz(part["file"], keys)
    chosen = {name: [structures[i] for i in part[name]] for name in ("train", "valid", "test")}
    table = tools.get_atomic_number_table_from_zs(
        z for structure in chosen["train"] for z in structure.atomic_numbers
    )
    by_element = data.compute_average_E0s(chosen["train"], table)
    energies = np.array([[by_element[z] for z in table.zs]])
    graphs = {
        name: [data.AtomicData.from_config(s, z_table=table, cutoff=args.r_max) for s in of_part]
        for name, of_part in chosen.items()
    }
    return graphs, table, energies


def plain(value):
    """Turn arrays into lists and classes and irreps into their names."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.tolist()
    return str(value)


def learn(peer, folder):
    """Train as the plan says and write the loss of each step, times and final errors."""
    losses, seconds, curve = Losses(), [], []
    epochs = peer.plan["training"]["epochs"]
    for number in range(epochs):
        if number:
            peer.scheduler.step()
        seconds.append(peer.epoch(number, losses=losses))
        if number % 5 == 4 or number == epochs - 1:
            valid = peer.errors("valid")
            curve.append([number + 1, float(valid["rmse_f"]), float(valid["rmse_e_per_atom"])])
            print(f"epoch {number + 1}: {seconds[-1]:.2f} s, {curve[-1]}", flush=True)
    test = {key: float(value) for key, value in peer.errors("test").items() if key != "time"}
    result = {
        "losses": losses.values,
        "epoch_seconds": seconds,
        "valid_curve": curve,
        "test": test,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in peer.model.parameters()),
        "versions": versions(),
    }
    (folder / "learn.json").write_text(json.dumps(result))
    print(json.dumps(test), flush=True)


def serve(plan, dataset, folder):
    """Answer requests, one JSON object a line: how long an epoch or a pass took."""
    peers = {dtype: Peer(plan, dataset, 0, dtype) for dtype in ("float64", "float32")}
    for peer in peers.values():
        peer.write_initial(made(folder / f"speed-{peer.dtype}"))
    answer({"ready": True, "versions": versions(), "threads": torch.get_num_threads()})
    for line in sys.stdin:
        request = json.loads(line)
        peer = peers[request["dtype"]]
        if request["what"] == "train":
            answer({"seconds": peer.epoch(0, batches=request["batches"])})
        elif request["what"] == "infer":
            answer({"seconds": infer(peer, request["batches"])})
        elif request["what"] == "outputs":
            answer(outputs(peer, request["batches"][0]))


def infer(peer, batches):
    """Time energies and forces of all batches, collation included."""
    tools.set_default_dtype(peer.dtype)
    loader = DataLoader(peer.parts["train"], batch_sampler=batches)
    start = time.perf_counter()
    evaluate(peer.model, peer.loss_fn, loader, peer.output_args, CPU)
    return time.perf_counter() - start


def outputs(peer, batch):
    """Compute energies and forces of one batch, so that the other side can compare."""
    tools.set_default_dtype(peer.dtype)
    first = next(iter(DataLoader(peer.parts["train"], batch_sampler=[batch])))
    result = peer.model(first.to_dict(), compute_force=True)
    return {name: result[name].detach().double().tolist() for name in ("energy", "forces")}


def answer(values):
    print(json.dumps(values), flush=True)


def made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def versions():
    import e3nn
    import mace

    return {"mace-torch": mace.__version__, "e3nn": e3nn.__version__, "torch": torch.__version__}


def main():
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("initial", "learn", "serve"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("dataset")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    args = parser.parse_args()
    plan = json.loads((args.folder / "plan.json").read_text())
    if args.what == "serve":
        serve(plan, args.dataset, args.folder)
        return
    peer = Peer(plan, args.dataset, args.seed, "float64")
    folder = made(args.folder / f"{args.dataset}-{args.seed}")
    peer.write_initial(folder)
    if args.what == "learn":
        learn(peer, folder)


if __name__ == "__main__":
    main()
