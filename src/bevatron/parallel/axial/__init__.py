"""One sample over several processes: pairs and alignments are sharded by rows.

Processes form data-parallel groups of `size` consecutive ranks; the ranks of a group, the axial
axis, compute one sample together. Every rank holds its own rows of a pair [..., N, N, C] and, in
stacks, of an alignment [..., S, N, C]; everything smaller is replicated within a group. `own_rows`
and `all_rows` convert between the two, `all_together` adds sums over own rows, `transposed` returns
a rank's rows of the transposed pair. `gathered` and `turned` start an exchange, so that other work
runs until its result is needed. On one process they return their argument or its transpose, so a
model reads the same on any number of processes.

Gradients. The differentiated quantity is the sum of the losses of all ranks, and the backward pass
of every collective is its exact transpose: gathering <-> summing to own rows, transposing <->
transposing back, taking own rows of a whole <-> zeros elsewhere, without communication. Hence

- values other than own rows are replicated: equal on all ranks of a group, to the last bit;
- every gradient, of activations and of weights, is partial: the gradients of the ranks sum to the
  gradient. Gradients of own rows are complete, since no other rank holds these rows;
- each rank's loss is that of the whole sample, divided by a count to which every rank of the group
  has added the sample. So the losses sum to the mean over samples, and so do the gradients.

`bevatron.parallel.data_parallel.sum_gradients` sums gradients over all ranks and knows nothing of
groups. No hook scales a gradient, and no parameter is special.
"""

from bevatron.parallel.axial.collectives import Coming
from bevatron.parallel.axial.groups import data_mesh, one_of, sample_group, shared, sizes_per_sample
from bevatron.parallel.axial.outer_product import outer_product_mean
from bevatron.parallel.axial.rows import (
    all_of,
    all_rows,
    all_together,
    gathered,
    own,
    own_rows,
    transposed,
    turned,
)
from bevatron.parallel.axial.triangle import triangle_multiply

__all__ = [
    "Coming",
    "all_of",
    "all_rows",
    "all_together",
    "data_mesh",
    "gathered",
    "one_of",
    "outer_product_mean",
    "own",
    "own_rows",
    "sample_group",
    "shared",
    "sizes_per_sample",
    "transposed",
    "triangle_multiply",
    "turned",
]
