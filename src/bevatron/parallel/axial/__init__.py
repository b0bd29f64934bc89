"""One sample over several processes: pairs and alignments divided by their rows.

Processes are data-parallel groups of `size` consecutive ranks, and the ranks of a group, the axial
axis, compute one sample together. Every rank holds its own rows of a pair [..., N, N, C] and, in
stacks, of an alignment [..., S, N, C]; all ranks of a group hold the whole of what is smaller.
`own_rows` and `all_rows` lead from one to the other, `all_together` adds up sums over own rows,
`transposed` gives a rank its rows of the transposed pair; `gathered` and `turned` begin exchanges,
and other work is launched until what they bring is waited for. On one process they are what they
are named after, or nothing, so that a model reads the same on any number.

Gradients. What is differentiated is one number, the sum of the losses of all ranks, and every
collective's backward pass is its exact transpose: gathering <-> summing to own rows, transposing
<-> transposing back, taking own rows of a whole <-> zeros elsewhere, without communication. Hence

- values that are not own rows are replicated: equal on all ranks of a group, to the last bit;
- every gradient, of activations and of weights, is partial: the ranks' gradients add up to the
  gradient. Those of own rows are whole, since nobody else holds these rows;
- each rank's loss is that of the whole sample, divided by a count to which every rank of the group
  has added the sample. So the losses add up to the mean over samples, and so do the gradients.

`bevatron.parallel.data_parallel.sum_gradients` adds up gradients over all ranks, and knows nothing
of groups. No hook scales a gradient, and no parameter is special.
"""

from bevatron.parallel.axial.collectives import Coming
from bevatron.parallel.axial.groups import (
    data_mesh,
    one_of,
    sample_group,
    shared,
    sizes_per_sample,
)
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
