"""Shared by all operators; nothing here imports an operator.

=====================  ==========================================================================
support                types and devices a kernel takes, why Triton cannot run
custom_op              declaring custom operators: fakes and the wiring of gradients
launch                 device guard, number of SMs, contiguous tensors, placeholder pointers
tiles                  sizes of blocks, and tables of them
dtypes                 the type in which sums accumulate
triton_math            accumulators, TF32 matmuls, sigmoids and other device functions
triton_partial_sums    adding the partial sums of a kernel's programs
rows                   rows of any strides, seen as three axes
chunked_linear         matmuls over chunks of rows, and sums of weight gradients
checks                 types and shapes of arguments
autograd               whether autograd records a call; empty gradients
=====================  ==========================================================================
"""
