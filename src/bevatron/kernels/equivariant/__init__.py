"""Operators of equivariant potentials.

Dimensions, in docstrings and in the shape comments of the kernels:

==  =============================================================================================
N   atoms (nodes)
E   edges
K   channels; J channels of the result of a linear map
M   components 2l + 1 of a degree l
S   components of all degrees, (l_max + 1)^2
P   paths of a tensor product; W = P K weights of an edge
B   radial basis functions
H   hidden features of a radial network
Z   elements
C   columns of the rows that `scatter_sum` adds
==  =============================================================================================

``[]`` is a scalar. ``ROWS``, ``COLUMNS`` and ``DEPTH`` are the tile of a matmul, where a row is an
edge or a component of an atom; `radial_tensor_product` has tiles [M, N] of depth K instead.
``BLOCK`` is the number of edges, channels or elements of a program, ``LANES`` what a warp holds one
per thread: edges in `edge_vectors`, channels in `symmetric_contraction`. ``FULL_H`` is H padded to
a power of two, and so on; ``FUNCTIONS`` is B padded, ``GROUPS`` is Z padded.
"""
