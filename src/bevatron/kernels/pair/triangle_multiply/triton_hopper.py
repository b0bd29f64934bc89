"""Triangle multiplication on Hopper: three passes over the pair, in Gluon.

They compute what `project_kernel`, `output_kernel` and `project_input_kernel` of this folder do,
for pairs without padding, of `WIDTH` channels of 16 bits. Those have three programs per SM, each of
which reads all weights from the L2 for 64 or 128 edges: as many bytes as the edges take. Here one
program per SM keeps the weights in shared memory, and its warp groups take tiles of 64 edges
independently of each other.

A right operand of a tensor core lies in shared memory, a left one in registers, where a thread
holds pairs of columns 8 apart. Which column is which is arbitrary in a sum over columns, so weights
are stored in K order: a thread's share of a left operand is then eight consecutive channels of an
edge, read and written as they lie in memory, 16 bytes at a time.

`WIDTH` channels both of the pair and of the contraction: C and H. A chunk is CHUNK channels of a or
b, or of the result.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

WIDTH, EDGES = gl.constexpr(128), gl.constexpr(64)
GROUPS = gl.constexpr(3)
"""Warp groups of a program here."""
GROUP_WIDTH = gl.constexpr(32)
"""Channels that a row of four threads holds, eight each."""
LOG2E = gl.constexpr(1.4426950408889634)
LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Of columns of channel-first tensors: 16 bytes a thread, 128 a row of eight."""
WEIGHT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
LINES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Of Triton 3.7 on, and before."""


@gluon.constexpr_function
def edge_rows(channels):
    """Return the layout of [64, channels] in which `k_order` gives a left operand."""
    groups = [[0, 32 * 2**i] for i in range((channels // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *groups],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, channels],
    )


@gluon.constexpr_function
def result_of(columns):
    """Return the layout of a matmul's result [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def k_order(x):
    """Reorder the columns of x, so that a thread's eight are those it holds of a left operand."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    apart = gl.reshape(x, [ROWS, COLUMNS // GROUP_WIDTH, 4, 2, 2, 2])
    return gl.reshape(gl.permute(apart, [0, 1, 3, 4, 2, 5]), [ROWS, COLUMNS])


@gluon.jit
def memory_order(x):
    """Undo `k_order`."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    apart = gl.reshape(x, [ROWS, COLUMNS // GROUP_WIDTH, 2, 2, 4, 2])
    return gl.reshape(gl.permute(apart, [0, 1, 4, 2, 3, 5]), [ROWS, COLUMNS])


@gluon.jit
def in_k_order(i):
    """Return the channel whose place in K order is i."""
    return i // 32 * 32 + i // 2 % 4 * 8 + i // 16 % 2 * 4 + i // 8 % 2 * 2 + i % 2


@gluon.jit
def logistic(z):
    """Compute the sigmoid as `shared.triton_math.logistic` does."""
    root = gl.rsqrt(1.0 + gl.exp2(z * -LOG2E))
    return root * root


@gluon.jit
def apply_norm(x, mean, rstd, Weight, Bias):
    """Apply LayerNorm to a tile [64, WIDTH] whose rows have these statistics [64, 1]."""
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, x.type.layout))
    weight = gl.load(Weight + col).to(gl.float32)  # [WIDTH]
    bias = gl.load(Bias + col).to(gl.float32)  # [WIDTH]
    xhat = (x.to(gl.float32) - mean) * rstd
    return (xhat * weight[None, :] + bias[None, :]).to(x.dtype)


@gluon.jit
def normalise(x, tile, Weight, Bias, Mean, Rstd, eps):
    """Apply LayerNorm to a tile [64, WIDTH], and write the statistics of its rows."""
    edge = tile * EDGES + gl.arange(0, EDGES, layout=gl.SliceLayout(1, x.type.layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, x.type.layout))
    wide = x.to(gl.float32)
    mean = gl.sum(wide, 1) / WIDTH  # [64]
    centred = wide - mean[:, None]
    rstd = gl.rsqrt(gl.sum(centred * centred, 1) / WIDTH + eps)  # [64]
    gl.store(Mean + edge, mean)
    gl.store(Rstd + edge, rstd)
    weight = gl.load(Weight + col).to(gl.float32)  # [WIDTH]
    bias = gl.load(Bias + col).to(gl.float32)  # [WIDTH]
    return (centred * rstd[:, None] * weight[None, :] + bias[None, :]).to(x.dtype)


@gluon.jit
def prefetch_rows(Base, first):
    """Bring 64 rows of the pair to the L2 cache, from row ``first``."""
    line = gl.arange(0, EDGES * WIDTH // 64, layout=LINES)
    # An instruction without a result: the zeros are not used.
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [Base + first * WIDTH + line * 64],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def first_channel(chunk, CHUNK: gl.constexpr):
    """Return the place in [4 H, ..] of a chunk's first value; the gates are H further."""
    return chunk // (WIDTH // CHUNK) * WIDTH * 2 + chunk % (WIDTH // CHUNK) * CHUNK


@gluon.jit
def interleaved(i):
    """Return the channel, relative to `first_channel`, of a row i of a joint chunk.

    Values and gates alternate in eights, so that a thread holds a value's gate too.
    """
    return i // 16 * 8 + i % 8 + i // 8 % 2 * WIDTH


@gluon.jit
def load_joint(weights, Joint, CHUNK: gl.constexpr):
    """Bring the weights of a, b and their gates to shared memory, a chunk at a time."""
    row = gl.arange(0, 2 * CHUNK, layout=gl.SliceLayout(1, WEIGHT_ROWS))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WEIGHT_ROWS))
    for chunk in range(2 * WIDTH // CHUNK):
        channel = first_channel(chunk, CHUNK) + interleaved(row)
        weight = gl.load(Joint + channel[:, None] * WIDTH + col[None, :])  # [2 CHUNK, C]
        weights.index(chunk).store(k_order(weight))


@gluon.jit
def load_layer(weights, Weight, CHUNK: gl.constexpr, ALL: gl.constexpr):
    """Bring a layer's weight to shared memory, its rows in K order, its columns too if ALL."""
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, WEIGHT_ROWS))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WEIGHT_ROWS))
    for chunk in range(WIDTH // CHUNK):
        channel = chunk * CHUNK + in_k_order(row)
        weight = gl.load(Weight + channel[:, None] * WIDTH + col[None, :])  # [CHUNK, C]
        if ALL:
            weight = k_order(weight)
        weights.index(chunk).store(weight)


@gluon.jit
def values_and_gates(both, chunk, JointBias, CHUNK: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Split a joint chunk [64, 2 CHUNK]; return values and gates, [64, CHUNK // 8, 8]."""
    if HAS_BIAS:
        i = gl.arange(0, 2 * CHUNK, layout=gl.SliceLayout(0, both.type.layout))
        bias = gl.load(JointBias + first_channel(chunk, CHUNK) + interleaved(i))  # [2 CHUNK]
        both += bias.to(gl.float32)[None, :]
    eights = gl.reshape(both, [EDGES, CHUNK // 8, 2, 8])
    return gl.split(gl.permute(eights, [0, 1, 3, 2]))


@gluon.jit
def write_chunk(both, chunk, stage, JointBias, Mask, AB, plane, tile, CHUNK: gl.constexpr,
                HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr):  # fmt: skip
    """Gate and mask a joint chunk and write it to a and b, channels outermost."""
    value, gate = values_and_gates(both, chunk, JointBias, CHUNK, HAS_BIAS)
    ab = gl.reshape(value * logistic(gate), [EDGES, CHUNK])
    if HAS_MASK:
        row = gl.arange(0, EDGES, layout=gl.SliceLayout(1, ab.type.layout))
        mask = gl.load(Mask + (tile * EDGES + row).to(gl.int64))  # [64]
        ab *= mask.to(gl.float32)[:, None]
    stage.store(gl.permute(ab.to(AB.dtype.element_ty), [1, 0]))
    channel = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LANES))
    col = tile * EDGES + gl.arange(0, EDGES, layout=gl.SliceLayout(0, LANES))
    at = AB + channel.to(gl.int64)[:, None] * plane + col[None, :]
    gl.store(at, stage.load(LANES))  # [CHUNK, 64]


@gluon.jit
def load_tile(Z, tile, plane):
    """Load 64 rows of the pair; zeros behind the last."""
    ROWS: gl.constexpr = edge_rows(WIDTH)
    row = tile * EDGES + gl.arange(0, EDGES, layout=gl.SliceLayout(1, ROWS))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    at = Z + row.to(gl.int64)[:, None] * WIDTH + col[None, :]
    return gl.load(at, mask=(row < plane)[:, None], other=0.0)  # [64, C]


@gluon.jit
def project_tiles(
    weights, stages, Z, NormWeight, NormBias, JointBias, Mask, AB, Normed, Mean, Rstd, eps, plane,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Take every tile of one warp group."""
    ROWS: gl.constexpr = edge_rows(WIDTH)
    RESULT: gl.constexpr = result_of(2 * CHUNK)
    row = gl.arange(0, EDGES, layout=gl.SliceLayout(1, ROWS))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    start, step = gl.program_id(0) * GROUPS + GROUP, gl.num_programs(0) * GROUPS
    x = load_tile(Z, start, plane)
    for tile in range(start, plane // EDGES, step):
        edge = (tile * EDGES + row).to(gl.int64)
        normed = normalise(x, tile, NormWeight, NormBias, Mean, Rstd, eps)
        left = gl.convert_layout(k_order(normed), gl.DotOperandLayout(0, RESULT, 2))
        gl.store(Normed + edge[:, None] * WIDTH + col[None, :], normed)
        x = load_tile(Z, tile + step, plane)
        zero = gl.zeros([EDGES, 2 * CHUNK], gl.float32, layout=RESULT)
        # The second matmul overlaps with what follows the first.
        for chunk in range(0, 2 * WIDTH // CHUNK, 2):
            one = warpgroup_mma(left, weights.index(chunk).permute((1, 0)), zero,
                                use_acc=False, is_async=True)  # fmt: skip
            two = warpgroup_mma(left, weights.index(chunk + 1).permute((1, 0)), zero,
                                use_acc=False, is_async=True)  # fmt: skip
            one = warpgroup_mma_wait(1, deps=(one,))
            write_chunk(one, chunk, stages.index(2 * GROUP), JointBias, Mask, AB, plane, tile,
                        CHUNK, HAS_BIAS, HAS_MASK)  # fmt: skip
            two = warpgroup_mma_wait(0, deps=(two,))
            write_chunk(two, chunk + 1, stages.index(2 * GROUP + 1), JointBias, Mask, AB, plane,
                        tile, CHUNK, HAS_BIAS, HAS_MASK)  # fmt: skip


@gluon.jit
def hopper_project_kernel(
    Z, NormWeight, NormBias, Joint, JointBias, Mask, AB, Normed, Mean, Rstd, eps, plane,
    HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr, CHUNK: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute a and b, AB [2 H, plane], the normalised rows and their statistics."""
    dtype: gl.constexpr = Z.dtype.element_ty
    weights = gl.allocate_shared_memory(dtype, [2 * WIDTH // CHUNK, 2 * CHUNK, WIDTH], SHARED)
    stages = gl.allocate_shared_memory(dtype, [2 * GROUPS, CHUNK, EDGES], SHARED)
    load_joint(weights, Joint, CHUNK)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (project_tiles, (
            weights, stages, Z, NormWeight, NormBias, JointBias, Mask, AB, Normed, Mean, Rstd,
            eps, plane, 0, HAS_BIAS, HAS_MASK, CHUNK,
        )),
        (project_tiles, (
            weights, stages, Z, NormWeight, NormBias, JointBias, Mask, AB, Normed, Mean, Rstd,
            eps, plane, 1, HAS_BIAS, HAS_MASK, CHUNK,
        )),
        (project_tiles, (
            weights, stages, Z, NormWeight, NormBias, JointBias, Mask, AB, Normed, Mean, Rstd,
            eps, plane, 2, HAS_BIAS, HAS_MASK, CHUNK,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


@gluon.jit
def gate_output(y, gate, Bias, GateBias, out, PART: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Return channels ``out`` of the gated result, in the order and layout of memory."""
    y = gl.convert_layout(memory_order(y), PART, assert_trivial=True)
    gate = gl.convert_layout(memory_order(gate), PART, assert_trivial=True)
    if HAS_BIAS:
        y += gl.load(Bias + out).to(gl.float32)[None, :]  # [CHUNK]
        gate += gl.load(GateBias + out).to(gl.float32)[None, :]  # [CHUNK]
    return y * logistic(gate)


@gluon.jit
def output_tiles(
    weights, gates, room, X, Normed, NormWeight, NormBias, Bias, GateBias, Drop, Z, Mean, Rstd, Y,
    eps, N, plane, edges,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_DROP: gl.constexpr,
    RESIDUAL: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Take every tile of one warp group; the next tile of x arrives meanwhile."""
    ROWS: gl.constexpr = edge_rows(WIDTH)
    PART: gl.constexpr = edge_rows(CHUNK)
    RESULT: gl.constexpr = result_of(CHUNK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    row = gl.arange(0, EDGES, layout=gl.SliceLayout(1, ROWS))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    part_row = gl.arange(0, EDGES, layout=gl.SliceLayout(1, PART))
    part = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, PART))
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LANES))
    lane = gl.arange(0, EDGES, layout=gl.SliceLayout(0, LANES))
    start, step = gl.program_id(0) * GROUPS + GROUP, gl.num_programs(0) * GROUPS
    last = plane // EDGES - 1
    x_at = X + channel.to(gl.int64)[:, None] * plane + lane[None, :]  # [H, 64]
    async_copy.async_copy_global_to_shared(
        room.index(2 * GROUP), x_at + gl.minimum(start, last) * EDGES
    )
    async_copy.commit_group()
    turn = 0
    for tile in range(start, last + 1, step):
        edge = (tile * EDGES + row).to(gl.int64)
        normed = gl.load(Normed + edge[:, None] * WIDTH + col[None, :])  # [64, C]
        async_copy.async_copy_global_to_shared(
            room.index(2 * GROUP + 1 - turn), x_at + gl.minimum(tile + step, last) * EDGES
        )
        async_copy.commit_group()
        async_copy.wait_group(1)
        x = room.index(2 * GROUP + turn).permute((1, 0)).load(LEFT)  # [64, H]
        turn = 1 - turn
        xn = normalise(x, tile, NormWeight, NormBias, Mean, Rstd, eps)
        left = gl.convert_layout(k_order(normed), LEFT)
        part_edge = tile * EDGES + part_row
        drop_row = part_edge
        if HAS_DROP:
            drop_row = part_edge // edges * N + part_edge % N
        for chunk in range(WIDTH // CHUNK):
            zero = gl.zeros([EDGES, CHUNK], gl.float32, layout=RESULT)
            y = warpgroup_mma(xn, weights.index(chunk).permute((1, 0)), zero,
                              use_acc=False, is_async=True)  # fmt: skip
            gate = warpgroup_mma(left, gates.index(chunk).permute((1, 0)), zero,
                                 use_acc=False, is_async=True)  # fmt: skip
            out = chunk * CHUNK + part
            at = part_edge.to(gl.int64)[:, None] * WIDTH + out[None, :]
            if RESIDUAL:
                z = gl.load(Z + at)  # [64, CHUNK]
            y, gate = warpgroup_mma_wait(0, deps=(y, gate))
            y = gate_output(y, gate, Bias, GateBias, out, PART, HAS_BIAS)
            if HAS_DROP:
                at_drop = Drop + drop_row.to(gl.int64)[:, None] * WIDTH + out[None, :]
                y *= gl.load(at_drop).to(gl.float32)  # [64, CHUNK]
            if RESIDUAL:
                y += z.to(gl.float32)
            gl.store(Y + at, y.to(Y.dtype.element_ty))
    async_copy.wait_group(0)


@gluon.jit
def hopper_output_kernel(
    X, Normed, NormWeight, NormBias, Weight, Gate, Bias, GateBias, Drop, Z, Mean, Rstd, Y,
    eps, N, plane, edges,
    HAS_BIAS: gl.constexpr, HAS_DROP: gl.constexpr, RESIDUAL: gl.constexpr, CHUNK: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute y, and mean and 1/sigma of x over its channels. A pair has ``edges`` rows."""
    dtype: gl.constexpr = X.dtype.element_ty
    weights = gl.allocate_shared_memory(dtype, [WIDTH // CHUNK, CHUNK, WIDTH], SHARED)
    gates = gl.allocate_shared_memory(dtype, [WIDTH // CHUNK, CHUNK, WIDTH], SHARED)
    room = gl.allocate_shared_memory(dtype, [2 * GROUPS, WIDTH, EDGES], SHARED)
    load_layer(weights, Weight, CHUNK, False)
    load_layer(gates, Gate, CHUNK, True)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (output_tiles, (
            weights, gates, room, X, Normed, NormWeight, NormBias, Bias, GateBias, Drop, Z,
            Mean, Rstd, Y, eps, N, plane, edges, 0, HAS_BIAS, HAS_DROP, RESIDUAL, CHUNK,
        )),
        (output_tiles, (
            weights, gates, room, X, Normed, NormWeight, NormBias, Bias, GateBias, Drop, Z,
            Mean, Rstd, Y, eps, N, plane, edges, 1, HAS_BIAS, HAS_DROP, RESIDUAL, CHUNK,
        )),
        (output_tiles, (
            weights, gates, room, X, Normed, NormWeight, NormBias, Bias, GateBias, Drop, Z,
            Mean, Rstd, Y, eps, N, plane, edges, 2, HAS_BIAS, HAS_DROP, RESIDUAL, CHUNK,
        )),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
