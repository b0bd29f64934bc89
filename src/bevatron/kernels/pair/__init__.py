"""Operators on pairs and alignments, as AlphaFold2 and AlphaFold3 have them.

Dimensions, in docstrings and in the shape comments of the kernels:

==  =============================================================================================
B   samples
S   rows of an alignment or of a pair
N   residues; Nq queries and Nk keys of an attention
C   channels of the rows that an operator takes
D   channels of a head of an attention; channels of the condition in `conditioned_transition`
H   heads of an attention; hidden channels of a transition; channels of each projection in
    `triangle_multiply` and `outer_product_mean`
Z   channels of the result, if not C
==  =============================================================================================

``C_PAD`` is C padded to a power of two, and so on. ``BLOCK`` is the number of rows of a block,
``BLOCK_Q``, ``BLOCK_C``, ... its size along one dimension; ``BLOCK_K`` is the number of keys, or
the depth of a matmul tile. A tile of `outer_product_mean` is [BM, BN], its depth BK.

Under autocast kernels compute in the type of their rows, as they do without. Tensors that must be
of one type are cast to that of the first.
"""

LARGE_PAIR = 2**30
"""Bytes of a pair (2,048 tokens with 128 channels of 16 bits) from which on less is saved for the
backward pass: memory decides what fits, and the longer the pair, the smaller the share of the time
that computing it again takes."""
