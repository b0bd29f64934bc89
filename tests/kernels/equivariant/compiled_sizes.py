"""Compiles matrix products for several GPUs; run by a test, in a process that does not interpret.

Writes for each GPU and kernel the bytes of shared memory that it takes and that there are.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bevatron.kernels.equivariant.radial_tensor_product import triton_matmul as matmul

ROOM = {86: 99, 90: 227, 100: 227}
"""KiB of shared memory for one program by compute capability, CUDA C++ Programming Guide."""


def shared_bytes(kernel, capability, tiles, **constants):
    """Compile for one GPU."""
    constants |= {"M": tiles.rows, "N": tiles.columns}
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name, t in types.items() if t == "*fp32"},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options).metadata.shared


if __name__ == "__main__":
    assert not torch.cuda.is_initialized()
    for capability, room in ROOM.items():
        for hidden, exact in ((64, True), (64, False), (matmul.WIDEST, True)):
            shape = {"WIDTH": 1280, "HIDDEN": hidden, "ADD": True, "K": hidden, "EXACT": exact}
            tiles = matmul.expand_tiles(capability // 10, hidden)
            taken = shared_bytes(matmul._expand, capability, tiles, PARTS=26, **shape)
            print(capability, hidden, exact, taken, room * 1024)
