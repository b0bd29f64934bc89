"""The mace-torch side of the comparison.

Model, data pipeline, loss, optimiser groups, schedule, averaged weights, training epoch and
evaluation are mace-torch's own functions, called as its command line calls them; only the order of
the batches is given.
"""

import json
import time

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

    name = "mace-torch"

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
        batches = self.plan["batches"][self.seed][number] if batches is None else batches
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

    def train(self, batches):
        """Train on batches; return the seconds, collation included."""
        return self.epoch(0, batches)

    def infer(self, batches):
        """Return the seconds of energies, forces and errors of all batches, collation included."""
        tools.set_default_dtype(self.dtype)
        loader = DataLoader(self.parts["train"], batch_sampler=batches)
        start = time.perf_counter()
        evaluate(self.model, self.loss_fn, loader, self.output_args, CPU)
        return time.perf_counter() - start

    def forces(self, batch):
        """Compute the forces on the atoms of one batch, [N, 3] float64."""
        tools.set_default_dtype(self.dtype)
        first = next(iter(DataLoader(self.parts["train"], batch_sampler=[batch])))
        return self.model(first.to_dict(), compute_force=True)["forces"].detach().double()

    def errors(self, part):
        """Evaluate a part of the data, with averaged weights, by mace's own function."""
        tools.set_default_dtype(self.dtype)
        loader = DataLoader(self.parts[part], batch_size=self.args.valid_batch_size)
        with self.ema.average_parameters():
            return evaluate(self.model, self.loss_fn, loader, self.output_args, CPU)[1]

    def initial(self):
        """Return the weights as they are now, and what a state dict does not hold."""
        config = scripts_utils.extract_config_mace_model(self.model)
        config["class"] = type(self.model).__name__
        # Irreps are tuples, which JSON would spell out.
        named = {k: str(v) if type(v).__name__ == "Irreps" else v for k, v in config.items()}
        state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        return state, json.loads(json.dumps(named, default=plain))


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
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else str(value)


def learn(peer):
    """Train as the plan says; return the loss of each step, times and final errors."""
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
    return {
        "losses": losses.values,
        "epoch_seconds": seconds,
        "valid_curve": curve,
        "test": {key: float(value) for key, value in peer.errors("test").items() if key != "time"},
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in peer.model.parameters()),
        "versions": versions(),
    }


def versions():
    import e3nn
    import mace

    return {"mace-torch": mace.__version__, "e3nn": e3nn.__version__, "torch": torch.__version__}
