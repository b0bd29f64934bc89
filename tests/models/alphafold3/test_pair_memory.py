"""What a block of the pair keeps until its backward pass if it is not computed again."""

import copy
import warnings

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from bevatron.kernels.shared.launch import planned_for_gpu
from bevatron.kernels.shared.triton_compile import nothing_launched
from bevatron.models.alphafold3.config_trunk import PairConfig
from bevatron.models.alphafold3.pair import PairBlock
from bevatron.train.profiling.autograd_memory import saved_bytes_by_module

TOKENS, WIDTH, HEADS = 256, 128, 4
BESIDE = 16 + 4 * HEADS + 2 * HEADS + 1
"""Bytes of an edge: two norms, for each head a sum of exponentials and a bias, and the mask."""
WEIGHTS = 2 * 6 * WIDTH**2
"""Bytes of a layer's weights, rounded and joined."""


def test_a_block_keeps_no_tensor_of_the_pair_twice():
    """Counted in tensors of 128 channels an edge.

    A multiplication keeps its input, that normalised, a, b and their contraction. An attention
    keeps its input, queries, keys, values, gate and result, all heads together, and no transposed
    pair beside the pair. A transition keeps its input.
    """
    fake, block = FakeTensorMode(), PairBlock(WIDTH, PairConfig()).to(torch.bfloat16)
    with FakeCopyMode(fake):
        block = copy.deepcopy(block)
    with warnings.catch_warnings(), planned_for_gpu(), nothing_launched(), fake:
        warnings.simplefilter("ignore")  # kernels look at the addresses of what has no memory
        z = torch.empty(TOKENS, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(TOKENS, TOKENS, dtype=torch.bool)
        kept = saved_bytes_by_module(block, lambda: block(z, mask).sum(), block.parameters())
    edges = TOKENS**2
    tensors = {
        "multiply_outgoing": 5,
        "multiply_incoming": 5,
        "attend_starting": 6,
        "attend_ending": 6,
        "transition": 1,
    }
    assert kept.keys() == tensors.keys()
    for name, number in tensors.items():
        whole, rest = divmod(kept[name].total, 2 * WIDTH * edges)
        assert whole == number, name
        assert rest <= BESIDE * edges + WEIGHTS, name
