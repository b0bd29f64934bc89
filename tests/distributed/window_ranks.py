"""What ranks that share a GPU do in their tests: ``python window_ranks.py MODE DEVICE``."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from bevatron.data.loader import Loader
from bevatron.data.samples import STRUCTURE_FIELDS, collate_structures
from bevatron.kernels import use
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.evoformer import ExtraMSAStack
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.pairformer import PairformerBlock
from bevatron.models.common.folding import Checkpointing
from bevatron.parallel.axial import one_of, own, own_rows, shared
from bevatron.parallel.axial.collectives import gather, transpose
from bevatron.parallel.mesh import open_mesh
from bevatron.parallel.turns import turns_of
from bevatron.parallel.windows import LARGE, WindowGroup
from bevatron.train.capture.cuda_graphs import GraphPool

sys.path.insert(0, str(Path(__file__).parents[1] / "data/loader"))
from loader_fakes import Structures

N, ROWS = 13, 5
"""Tokens or residues, and rows of the alignment: parts of unequal length on 2 and 3 ranks."""
REPLAYS, RESULTS = 3, 2


def every_exchange(group, whole):
    """All exchanges of own rows of a square, each with what it means, hidden or not."""
    total, rows = len(whole), own_rows(whole)
    flipped = own_rows(whole.transpose(0, 1))
    for one in (group, group.urgent):
        own_columns = own(whole, 1).clone()
        yield gather(rows.clone(), 0, total, one).wait(), whole
        yield gather(own_columns, 1, total, one).wait(), whole
        yield transpose(rows.clone(), total, one).wait(), flipped
        given = rows.clone().requires_grad_()
        (found,) = torch.autograd.grad(gather(given, 0, total, one).wait(), given, whole)
        yield found, group.size * rows
        following = whole.split([len(x) for x in whole.tensor_split(group.size)])
        after = following[(group.index + 1) % group.size]
        most = following[0].nbytes
        yield one.pass_on(rows.clone(), torch.empty_like(after), most).wait(), after


def exchange(device, group):
    """Launch and replay all exchanges, small and large ones in turn; numbers change every time."""
    sides = 7, group.size * int((LARGE / 16) ** 0.5) + 5  # pieces of a transpose are large, too
    squares = [torch.zeros(side, side, 4, device=device) for side in sides]
    found, pool = [], GraphPool(device)

    def all_of_them():
        found[:] = [pair for whole in squares for pair in every_exchange(group, whole)]

    replay = pool.capture(all_of_them)
    for number in range(REPLAYS):
        for whole in squares:
            make = torch.Generator(device).manual_seed(number)
            whole.copy_(torch.randint(-99, 99, whole.shape, generator=make, device=device))
        replay()
        for one, expected in found:
            assert torch.equal(one, expected)


class Stack(ExtraMSAStack):
    """A stack as a block."""

    def forward(self, state, *masks):
        return self.run(*state, *masks, Drops(None))


def blocks():
    """A Pairformer and an Evoformer block, their state, which of it is cut, and masks."""
    two, three = AlphaFold2Config.preset("small"), AlphaFold3Config.preset("small")
    single, pair = three.widths.single, three.widths.pair
    kept, tokens = Checkpointing("none"), torch.arange(N) != 3
    of_pairs, of_rows = tokens[:, None] & tokens, tokens.expand(ROWS, N).clone()
    pairformer = PairformerBlock(single, pair, three.pairformer, kept)
    stack = Stack(two.c_m, two.c_z, replace(two.extra_msa, num_blocks=1), kept)
    state = torch.randn(N, single), torch.randn(N, N, pair)
    alignment = torch.randn(ROWS, N, two.c_m), torch.randn(N, N, two.c_z)
    return (
        (pairformer, state, (False, True), (tokens, of_pairs)),
        (stack, alignment, (True, True), (of_rows, of_pairs)),
    )


def differentiated(block, state, divided, masks, size):
    """Call of a block that returns its results and all gradients, which ranks add up."""
    given = [
        (own_rows(x) if cut else x).clone().requires_grad_()
        for x, cut in zip(state, divided, strict=True)
    ]

    def call():
        found = block(tuple(given), *masks)
        cuts = zip(found, divided, strict=True)
        loss = sum(x.square().sum() / (1 if cut else size) for x, cut in cuts)
        gradients = torch.autograd.grad(loss, [*given, *block.parameters()])
        # What remembers its history would tie a later capture to this stream.
        return [*(x.detach() for x in found), *gradients]

    return call


def compare(device, mesh, block, state, divided, masks):
    """Compare a block of all ranks with one process: launched, and as a replayed graph."""
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    with one_of(1):
        whole = differentiated(block, state, divided, masks, 1)()
    with shared(mesh, mesh.world):
        call = differentiated(block, state, divided, masks, mesh.world)
        cuts = [*divided, *divided, *[False] * len(whole)]  # results, gradients of state, weights
        expected = [own_rows(x) if cut else x for x, cut in zip(whole, cuts, strict=False)]
        check(call(), expected, cuts)
        found = []
        replay = GraphPool(device).capture(lambda: found.__setitem__(slice(None), call()))
        for _ in range(REPLAYS):
            for x in found:
                x.zero_()
            replay()
            check(found, expected, cuts)


def check(found, expected, cuts):
    """Compare with the largest number of all; gradients of which ranks have shares are added up."""
    largest = max(float(x.abs().max()) for x in expected)
    for k, (one, other, cut) in enumerate(zip(found, expected, cuts, strict=False)):
        total = one.cpu().clone()
        if k >= RESULTS and not cut:
            distributed.all_reduce(total)
        error = float((total - other.cpu()).abs().max())
        assert error <= 1e-5 * largest, (k, error, largest)


def die(device, group):
    """Rank 1 is killed while the others wait for it on the GPU."""
    part = torch.ones(4, 4, 4, device=device)
    total = 4 * group.size
    gather(part, 0, total, group).wait()
    if group.index == 1:
        print("is killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    gather(part, 0, total, group).wait()
    torch.cuda.synchronize()
    time.sleep(60)


def load(mesh, group):
    """Load the batches of two plans in turns; each is there on all ranks, pinned on a GPU."""
    pinned = mesh.device.type == "cuda"
    sample = {
        field.name: np.ones((2, *field.shape) if field.ragged else field.shape, dtype=field.dtype)
        for field in STRUCTURE_FIELDS
    }
    plans = [(np.arange(k, k + 2), np.ones(2)) for k in range(7)]
    with Loader(
        Structures(sample), [], collate_structures,
        workers=1, pin_memory=pinned, turns=turns_of(group, mesh),
    ) as loader:  # fmt: skip
        for batches in (plans, plans[::-1]):
            loader.set_batches(batches)
            found = [loaded.batch for loaded in loader]
            indices = [batch.sample_indices.tolist() for batch in found]
            assert indices == [given.tolist() for given, _ in batches]
            assert all(bool(batch.positions.eq(1).all()) for batch in found)
            assert all(batch.positions.is_pinned() == pinned for batch in found)


def main(mode, name):
    """Run a mode."""
    with open_mesh(name, timeout_seconds=60) as mesh:
        device = mesh.device
        with shared(mesh, mesh.world) as group:
            if mode == "load":
                load(mesh, group)
                return
            assert isinstance(group, WindowGroup), "the ranks cannot read each other's memory"
            if mode == "die":
                die(device, group)
            exchange(device, group)
        torch.manual_seed(0)
        with device:
            cases = blocks()
        with use("reference"):  # every rank would compile the kernels of its own shapes
            for case in cases:
                compare(device, mesh, *case)


if __name__ == "__main__":
    main(*sys.argv[1:])
