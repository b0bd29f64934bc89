"""Operators of attention on one sparse graph, and `csr`, the data structure they run on.

Dimensions, in docstrings and in the shape comments of the kernels:

===  ============================================================================================
n    vertices; rows and columns of the matrix
nnz  entries of the matrix (edges)
H    heads
C    channels of a head
D    channels of a head's values, where they differ from C
K    features of a vertex in `graph_blocks`
===  ============================================================================================

``[]`` is a scalar. ``R`` is the number of rows (or columns) of a program, ``E`` the number of their
entries in one step, ``BLOCK_C`` and ``BLOCK_D`` the channels of a program. Gathered features are
[R, E, BLOCK_C]; in `graph_attention` [E, R, BLOCK_C], which puts the lanes of a warp on rows. In
merge kernels ``E`` counts the partial results of a cut row that are loaded at once.
"""
