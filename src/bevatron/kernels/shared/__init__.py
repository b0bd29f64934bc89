"""What operators share, each thing once; no operator imports another operator's private modules.

`support` (what a kernel takes, why Triton cannot run), `custom_op` (declaring custom operators),
`launch` (device, number of SMs), `dtypes` (accumulator types).
"""
