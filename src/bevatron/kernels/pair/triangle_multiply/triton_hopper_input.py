"""Triangle multiplication on Hopper: the gradient of the pair, as `triton_hopper` has it.

The gradients of a and b arrive a chunk at a time in a ring of `RING` buffers in shared memory: a
GPU whose memory is busy with stores answers a load after several microseconds.
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

from bevatron.kernels.pair.triangle_multiply.triton_hopper import (
    EDGES,
    LANES,
    SHARED,
    WIDTH,
    apply_norm,
    barrier,
    edge_rows,
    first_channel,
    interleaved,
    k_order,
    load_joint,
    load_layer,
    logistic,
    memory_order,
    prefetch_rows,
    result_of,
    values_and_gates,
)

GROUPS = gl.constexpr(2)
"""Warp groups of a program here."""
RING = gl.constexpr(12)
"""Slots, an even number."""
AHEAD = gl.constexpr(RING.value - 2)
"""Chunks on their way: all but the two in use."""


@gluon.jit
def gradients_of(both, d, chunk, mask, JointBias, CHUNK: gl.constexpr, HAS_BIAS: gl.constexpr,
                 HAS_MASK: gl.constexpr):  # fmt: skip
    """Return gradients of values and gates [64, 2 CHUNK], from those of a chunk, d [64, CHUNK]."""
    value, gate = values_and_gates(both, chunk, JointBias, CHUNK, HAS_BIAS)
    wide = gl.convert_layout(d, result_of(CHUNK), assert_trivial=True).to(gl.float32)
    if HAS_MASK:
        wide *= mask[:, None]
    wide = gl.reshape(wide, [EDGES, CHUNK // 8, 8])
    wide = gl.convert_layout(wide, value.type.layout, assert_trivial=True)
    s = logistic(gate)
    dvalue = wide * s
    dgate = dvalue * value * (1.0 - s)
    joined = gl.join(dvalue.to(d.dtype), dgate.to(d.dtype))
    return gl.reshape(gl.permute(joined, [0, 1, 3, 2]), [EDGES, 2 * CHUNK])


@gluon.jit
def write_gradients(joined, stage, at, chunk, plane, tile, CHUNK: gl.constexpr):
    """Write the gradients of a joint chunk, channels outermost."""
    stage.store(gl.permute(joined, [1, 0]))
    there = first_channel(chunk, CHUNK).to(gl.int64) * plane + tile * EDGES
    gl.store(at + there, stage.load(LANES))  # [2 CHUNK, 64]


@gluon.jit
def norm_gradient(g, x, mean, rstd, Weight):
    """Return the gradient of rows x [64, C] from that of their LayerNorm."""
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, g.type.layout))
    g *= gl.load(Weight + col).to(gl.float32)[None, :]  # [C]
    xhat = (x.to(gl.float32) - mean) * rstd
    mean_g = gl.sum(g, 1) / WIDTH  # [64]
    mean_gx = gl.sum(g * xhat, 1) / WIDTH  # [64]
    return (g - mean_g[:, None] - xhat * mean_gx[:, None]) * rstd


@gluon.jit
def ask(ring, d_at, chunk, tile, plane, CHUNK: gl.constexpr):
    """Start copying a chunk of d to a slot of the ring."""
    there = first_channel(chunk, CHUNK).to(gl.int64) * plane + tile * EDGES
    async_copy.async_copy_global_to_shared(ring, d_at + there)
    async_copy.commit_group()


@gluon.jit
def add_chunks(
    g, slot, left, weights, stages, ring, d_at, joint_at, mask, JointBias, plane, tile, next_tile,
    GROUP: gl.constexpr, CHUNK: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr,
):  # fmt: skip
    """Add what flows back through a and b of a tile to g [64, C]; return it and the next slot.

    ``left`` are the normalised rows as a left operand.
    """
    CHUNKS: gl.constexpr = 2 * WIDTH // CHUNK
    RESULT: gl.constexpr = result_of(2 * CHUNK)
    LEFT_OF_SUM: gl.constexpr = gl.DotOperandLayout(0, result_of(WIDTH), 2)
    LEFT_HALF: gl.constexpr = gl.DotOperandLayout(0, result_of(CHUNK), 2)
    zero = gl.zeros([EDGES, 2 * CHUNK], gl.float32, layout=RESULT)
    # The matmuls of one chunk overlap with the arithmetic of the other.
    for chunk in range(0, CHUNKS, 2):
        one = warpgroup_mma(left, weights.index(chunk).permute((1, 0)), zero,
                            use_acc=False, is_async=True)  # fmt: skip
        two = warpgroup_mma(left, weights.index(chunk + 1).permute((1, 0)), zero,
                            use_acc=False, is_async=True)  # fmt: skip
        async_copy.wait_group(AHEAD - 2)
        first = ring.index(GROUP * RING + slot)  # [CHUNK, 64]
        second = ring.index(GROUP * RING + slot + 1)  # [CHUNK, 64]
        d_one = first.permute((1, 0)).load(LEFT_HALF)  # [64, CHUNK]
        d_two = second.permute((1, 0)).load(LEFT_HALF)  # [64, CHUNK]
        one = warpgroup_mma_wait(1, deps=(one,))
        one = gradients_of(one, d_one, chunk, mask, JointBias, CHUNK, HAS_BIAS, HAS_MASK)
        left_one = gl.convert_layout(one, LEFT_OF_SUM)
        g = warpgroup_mma(left_one, weights.index(chunk), g, is_async=True)
        write_gradients(one, stages.index(2 * GROUP), joint_at, chunk, plane, tile, CHUNK)
        two = warpgroup_mma_wait(1, deps=(two,))
        two = gradients_of(two, d_two, chunk + 1, mask, JointBias, CHUNK, HAS_BIAS, HAS_MASK)
        left_two = gl.convert_layout(two, LEFT_OF_SUM)
        g = warpgroup_mma(left_two, weights.index(chunk + 1), g, is_async=True)
        write_gradients(two, stages.index(2 * GROUP + 1), joint_at, chunk + 1, plane, tile,
                        CHUNK)  # fmt: skip
        free = gl.where(slot >= 2, slot - 2, slot + RING - 2)
        for i in gl.static_range(2):
            ahead = chunk + i + AHEAD
            of_tile = gl.where(ahead < CHUNKS, tile, next_tile)
            ask(ring.index(GROUP * RING + free + i), d_at, ahead % CHUNKS, of_tile, plane,
                CHUNK)  # fmt: skip
        slot = gl.where(slot + 2 < RING, slot + 2, 0)
        # A left operand is read from its registers until then.
        g = warpgroup_mma_wait(0, deps=(g, left_one, left_two))[0]
    return g, slot


@gluon.jit
def input_tiles(
    weights, gates, stages, ring, D, Z, NormBias, NormWeight, JointBias, Mask, Mean, Rstd, DY, DZ,
    plane,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr,
    RESIDUAL: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Take every tile of one warp group."""
    ROWS: gl.constexpr = edge_rows(WIDTH)
    WIDE: gl.constexpr = result_of(WIDTH)
    HALF: gl.constexpr = result_of(CHUNK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, result_of(2 * CHUNK), 2)
    LEFT_OF_SUM: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    row = gl.arange(0, EDGES, layout=gl.SliceLayout(1, ROWS))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    channel = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LANES))
    joint = interleaved(gl.arange(0, 2 * CHUNK, layout=gl.SliceLayout(1, LANES)))
    lane = gl.arange(0, EDGES, layout=gl.SliceLayout(0, LANES))
    start, step = gl.program_id(0) * GROUPS + GROUP, gl.num_programs(0) * GROUPS
    last = plane // EDGES - 1
    d_at = D + channel.to(gl.int64)[:, None] * plane + lane[None, :]  # [CHUNK, 64]
    joint_at = D + joint.to(gl.int64)[:, None] * plane + lane[None, :]  # [2 CHUNK, 64]
    for chunk in range(AHEAD):
        ask(ring.index(GROUP * RING + chunk), d_at, chunk, gl.minimum(start, last), plane, CHUNK)
    slot = 0
    for tile in range(start, last + 1, step):
        edge = (tile * EDGES + row).to(gl.int64)
        at = edge[:, None] * WIDTH + col[None, :]
        dgate = gl.load(DZ + at)  # [64, C]
        mean = gl.load(Mean + edge)[:, None]  # [64, 1]
        rstd = gl.load(Rstd + edge)[:, None]  # [64, 1]
        x = gl.load(Z + at)  # [64, C]
        next_tile = gl.minimum(tile + step, last)
        prefetch_rows(DZ, next_tile.to(gl.int64) * EDGES)
        prefetch_rows(Z, next_tile.to(gl.int64) * EDGES)
        mask = rstd
        if HAS_MASK:
            half_row = gl.arange(0, EDGES, layout=gl.SliceLayout(1, HALF))
            # [64]
            mask = gl.load(Mask + (tile * EDGES + half_row).to(gl.int64)).to(gl.float32)
        g = gl.zeros([EDGES, WIDTH], gl.float32, layout=WIDE)
        dgate = gl.convert_layout(k_order(dgate), LEFT_OF_SUM)
        normed = apply_norm(x, mean, rstd, NormWeight, NormBias)
        left = gl.convert_layout(k_order(normed), LEFT)
        g = warpgroup_mma(dgate, gates.index(0), g, use_acc=False)
        g, slot = add_chunks(
            g, slot, left, weights, stages, ring, d_at, joint_at, mask, JointBias, plane, tile,
            next_tile, GROUP, CHUNK, HAS_BIAS, HAS_MASK,
        )  # fmt: skip
        dz = norm_gradient(gl.convert_layout(memory_order(g), ROWS), x, mean, rstd, NormWeight)
        if RESIDUAL:
            dz += gl.load(DY + at).to(gl.float32)  # [64, C]
        gl.store(DZ + at, dz.to(DZ.dtype.element_ty))
    async_copy.wait_group(0)


@gluon.jit
def hopper_project_input_kernel(
    D, Z, NormBias, NormWeight, Joint, JointBias, Mask, Gate, Mean, Rstd, DY, DZ, plane,
    HAS_BIAS: gl.constexpr, HAS_MASK: gl.constexpr, RESIDUAL: gl.constexpr, CHUNK: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dz from d a and d b, in D, and from the gradient of the gate, in DZ.

    D is [4 H, plane], as `project_input_kernel` takes and leaves it. That reads the normalised
    rows; here the pair is normalised again, which takes less time.
    """
    dtype: gl.constexpr = Z.dtype.element_ty
    weights = gl.allocate_shared_memory(dtype, [2 * WIDTH // CHUNK, 2 * CHUNK, WIDTH], SHARED)
    gates = gl.allocate_shared_memory(dtype, [1, WIDTH, WIDTH], SHARED)
    stages = gl.allocate_shared_memory(dtype, [2 * GROUPS, 2 * CHUNK, EDGES], SHARED)
    ring = gl.allocate_shared_memory(dtype, [GROUPS * RING, CHUNK, EDGES], SHARED)
    load_joint(weights, Joint, CHUNK)
    load_layer(gates, Gate, WIDTH, True)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (input_tiles, (
            weights, gates, stages, ring, D, Z, NormBias, NormWeight, JointBias, Mask, Mean, Rstd,
            DY, DZ, plane, 0, HAS_BIAS, HAS_MASK, RESIDUAL, CHUNK,
        )),
        (input_tiles, (
            weights, gates, stages, ring, D, Z, NormBias, NormWeight, JointBias, Mask, Mean, Rstd,
            DY, DZ, plane, 1, HAS_BIAS, HAS_MASK, RESIDUAL, CHUNK,
        )),
    ], [4], [REGISTERS])  # fmt: skip
