"""The kernels of sums over an atom's bonds.

The edges out of an atom are the reverse ones, e ^ 1, of those into it, so one list serves both. The
sum over neighbours is its own transpose: the backward pass of the one is the other.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _scaled(
    Messages, Scale, edge, real, col, C: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr
):
    """Load messages of some edges, times their factors."""
    inside = real[:, None] & (col < C)[None, :]
    rows = tl.load(Messages + edge[:, None] * C + col[None, :], mask=inside, other=0.0).to(WIDE)
    if SCALED:
        rows *= tl.load(Scale + edge, mask=real, other=0.0).to(WIDE)[:, None]
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

    COPY puts an atom's own row behind the sum over its neighbours, ADD adds it to that, and MORE
    adds a row of More, [N, D].
    """
    atom = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = atom < N
    begin = tl.load(IncomingPtr + atom, mask=here, other=0).to(tl.int64)
    end = tl.load(IncomingPtr + atom + 1, mask=here, other=0).to(tl.int64)
    number = (end - begin).to(tl.int32)
    cols_C = tl.arange(0, C_PAD)
    cols_D = tl.arange(0, D_PAD)
    offset = 0
    if MESSAGES:
        into = tl.zeros([BLOCK, C_PAD], WIDE)
        offset += C
        if OUTGOING:
            out_of = tl.zeros([BLOCK, C_PAD], WIDE)
            offset += C
    if NODES:
        around = tl.zeros([BLOCK, D_PAD], WIDE)
    for place in range(tl.max(number, 0)):
        real = here & (place < number)
        edge = tl.load(Incoming + begin + place, mask=real, other=0).to(tl.int64)
        if MESSAGES:
            into += _scaled(Messages, Scale, edge, real, cols_C, C, SCALED, WIDE)
            if OUTGOING:
                out_of += _scaled(Messages, Scale, edge ^ 1, real, cols_C, C, SCALED, WIDE)
        if NODES:
            sender = tl.load(Senders + edge, mask=real, other=0).to(tl.int64)
            at = Nodes + sender[:, None] * n_N + cols_D[None, :]
            around += tl.load(at, mask=real[:, None] & (cols_D < D)[None, :], other=0.0).to(WIDE)
    out = Out + atom[:, None] * out_N
    if MESSAGES:
        inside_C = here[:, None] & (cols_C < C)[None, :]
        tl.store(out + cols_C[None, :], into.to(Out.dtype.element_ty), mask=inside_C)
        if OUTGOING:
            at = out + C + cols_C[None, :]
            tl.store(at, out_of.to(Out.dtype.element_ty), mask=inside_C)
    if NODES:
        inside = here[:, None] & (cols_D < D)[None, :]
        if COPY or ADD:
            own = tl.load(Own + atom[:, None] * n_N + cols_D[None, :], mask=inside, other=0.0)
        if ADD:
            around += own.to(WIDE)
        if MORE:
            at = More + atom[:, None] * D + cols_D[None, :]
            around += tl.load(at, mask=inside, other=0.0).to(WIDE)
        tl.store(out + offset + cols_D[None, :], around.to(Out.dtype.element_ty), mask=inside)
        if COPY:
            at = out + offset + D + cols_D[None, :]
            tl.store(at, own.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["E"])
def neighbour_sums_backward(
    DOut, Scale, More, Senders, Receivers, DMessages, E, d_N, C: tl.constexpr,
    C_PAD: tl.constexpr, BLOCK: tl.constexpr, OUTGOING: tl.constexpr, SCALED: tl.constexpr,
    MORE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Give BLOCK edges the gradients of their receivers and senders, and rows of More."""
    edge = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, C_PAD)
    here = edge < E
    inside = here[:, None] & (col < C)[None, :]
    receiver = tl.load(Receivers + edge, mask=here, other=0).to(tl.int64)
    at = DOut + receiver[:, None] * d_N + col[None, :]
    total = tl.load(at, mask=inside, other=0.0).to(WIDE)
    if OUTGOING:
        sender = tl.load(Senders + edge, mask=here, other=0).to(tl.int64)
        at = DOut + sender[:, None] * d_N + C + col[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(WIDE)
    if SCALED:
        total *= tl.load(Scale + edge, mask=here, other=0.0).to(WIDE)[:, None]
    if MORE:
        at = More + edge[:, None] * C + col[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(WIDE)
    at = DMessages + edge[:, None] * C + col[None, :]
    tl.store(at, total.to(DMessages.dtype.element_ty), mask=inside)
