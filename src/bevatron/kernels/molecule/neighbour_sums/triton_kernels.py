"""The kernels of sums over an atom's bonds.

`neighbour_sums_kernel`: a program owns BLOCK atoms and walks their incoming edges one at a time,
gathering whole rows of messages and of neighbours and accumulating them in registers; it writes
one row per atom. `neighbour_sums_backward`: a program owns BLOCK edges and gathers the gradients of
their two atoms.

The edges out of an atom are the reverse ones, e ^ 1, of those into it, so one list serves both. The
sum over neighbours is its own transpose: its backward pass is the forward kernel.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _scaled(
    Messages, Scale, edge, valid, col, C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr
):
    """Load the messages of BLOCK edges, times their scale, as [BLOCK, C_PAD]."""
    mask = valid[:, None] & (col < C)[None, :]
    rows_ptr = Messages + edge[:, None] * C + col[None, :]
    rows = tl.load(rows_ptr, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    if SCALED:
        scale = tl.load(Scale + edge, mask=valid, other=0.0).to(WIDE)  # [BLOCK]
        rows *= scale[:, None]
    return rows


@triton.jit(do_not_specialize=["N"])
def neighbour_sums_kernel(  # noqa: C901, PLR0912  one pass over the edges, parts left out when compiled
    Messages, Nodes, Own, More, Scale, Senders, Incoming, IncomingPtr, Out, N, n_N, out_N,
    C: tl.constexpr, C_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK: tl.constexpr, MESSAGES: tl.constexpr, OUTGOING: tl.constexpr, NODES: tl.constexpr,
    COPY: tl.constexpr, ADD: tl.constexpr, MORE: tl.constexpr, SCALED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum over the bonds of BLOCK atoms.

    COPY writes an atom's own row after the sum over its neighbours, ADD adds it to that sum, and
    MORE adds a row of More, [N, D].
    """
    atom = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_atom = atom < N
    begin = tl.load(IncomingPtr + atom, mask=is_atom, other=0).to(tl.int64)  # [BLOCK]
    end = tl.load(IncomingPtr + atom + 1, mask=is_atom, other=0).to(tl.int64)  # [BLOCK]
    degree = (end - begin).to(tl.int32)
    cols_C = tl.arange(0, C_PAD)
    cols_D = tl.arange(0, D_PAD)
    offset = 0
    if MESSAGES:
        incoming = tl.zeros([BLOCK, C_PAD], WIDE)
        offset += C
        if OUTGOING:
            outgoing = tl.zeros([BLOCK, C_PAD], WIDE)
            offset += C
    if NODES:
        neighbours = tl.zeros([BLOCK, D_PAD], WIDE)
    for i in range(tl.max(degree, 0)):
        valid = is_atom & (i < degree)
        edge = tl.load(Incoming + begin + i, mask=valid, other=0).to(tl.int64)  # [BLOCK]
        if MESSAGES:
            incoming += _scaled(Messages, Scale, edge, valid, cols_C, C, SCALED, WIDE)
            if OUTGOING:
                outgoing += _scaled(Messages, Scale, edge ^ 1, valid, cols_C, C, SCALED, WIDE)
        if NODES:
            sender = tl.load(Senders + edge, mask=valid, other=0).to(tl.int64)  # [BLOCK]
            node = Nodes + sender[:, None] * n_N + cols_D[None, :]
            mask_D = valid[:, None] & (cols_D < D)[None, :]
            neighbours += tl.load(node, mask=mask_D, other=0.0).to(WIDE)  # [BLOCK, D_PAD]
    out = Out + atom[:, None] * out_N
    if MESSAGES:
        mask_C = is_atom[:, None] & (cols_C < C)[None, :]
        tl.store(out + cols_C[None, :], incoming.to(Out.dtype.element_ty), mask=mask_C)
        if OUTGOING:
            out_C = out + C + cols_C[None, :]
            tl.store(out_C, outgoing.to(Out.dtype.element_ty), mask=mask_C)
    if NODES:
        mask_D = is_atom[:, None] & (cols_D < D)[None, :]
        if COPY or ADD:
            own_ptr = Own + atom[:, None] * n_N + cols_D[None, :]
            own = tl.load(own_ptr, mask=mask_D, other=0.0)  # [BLOCK, D_PAD]
        if ADD:
            neighbours += own.to(WIDE)
        if MORE:
            more = More + atom[:, None] * D + cols_D[None, :]
            neighbours += tl.load(more, mask=mask_D, other=0.0).to(WIDE)  # [BLOCK, D_PAD]
        tl.store(out + offset + cols_D[None, :], neighbours.to(Out.dtype.element_ty), mask=mask_D)
        if COPY:
            out_D = out + offset + D + cols_D[None, :]
            tl.store(out_D, own.to(Out.dtype.element_ty), mask=mask_D)


@triton.jit(do_not_specialize=["E"])
def neighbour_sums_backward(
    DOut, Scale, More, Senders, Receivers, DMessages, E, d_N, C: tl.constexpr,
    C_PAD: tl.constexpr, BLOCK: tl.constexpr, OUTGOING: tl.constexpr, SCALED: tl.constexpr,
    MORE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK messages from those of their two atoms, plus rows of More."""
    edge = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    valid = edge < E
    mask = valid[:, None] & (col < C)[None, :]
    receiver = tl.load(Receivers + edge, mask=valid, other=0).to(tl.int64)  # [BLOCK]
    received = DOut + receiver[:, None] * d_N + col[None, :]
    total = tl.load(received, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    if OUTGOING:
        sender = tl.load(Senders + edge, mask=valid, other=0).to(tl.int64)  # [BLOCK]
        sent = DOut + sender[:, None] * d_N + C + col[None, :]
        total += tl.load(sent, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    if SCALED:
        scale = tl.load(Scale + edge, mask=valid, other=0.0).to(WIDE)  # [BLOCK]
        total *= scale[:, None]
    if MORE:
        more = More + edge[:, None] * C + col[None, :]
        total += tl.load(more, mask=mask, other=0.0).to(WIDE)  # [BLOCK, C_PAD]
    out = DMessages + edge[:, None] * C + col[None, :]
    tl.store(out, total.to(DMessages.dtype.element_ty), mask=mask)
