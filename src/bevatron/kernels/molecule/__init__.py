"""Operators of message passing and attention on batches of molecules.

Dimensions, in docstrings and in the shape comments of the kernels:

==  =============================================================================================
G   molecules
N   atoms
E   directed edges, two for each bond
P   pairs of atoms of one molecule
M   rows of any kind; S segments of rows
C   channels of rows
D   features of an atom in `neighbour_sums`; channels of a head in `molecule_attention`
H   heads
K   Gaussian kernels; input channels of `linear`, O its output channels
==  =============================================================================================

``[]`` is a scalar. ``BLOCK`` is the number of rows (atoms, edges, queries, keys, elements) of a
program, ``BLOCK_C`` the channels of a program, ``HEADS`` its heads. ``C_PAD`` is C padded to a
power of two, and so on.
"""
