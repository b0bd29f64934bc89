"""Sums over the bonds of every atom in Triton: two custom operators and their launches."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevatron.kernels.molecule.bonds import Bonds
from bevatron.kernels.molecule.neighbour_sums.triton_kernels import (
    neighbour_sums_backward,
    neighbour_sums_kernel,
)
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.triton_math import accumulator

__all__ = ["launch_gather", "neighbour_sums"]
"""Names that other operators may use."""

ELEMENTS = 2048
"""Elements that a program accumulates, as many as fit its registers."""
MOST_ATOMS = 16
"""Most atoms of a program; with more, Triton 3.6 and 3.7 fail to compile it for narrow rows."""


def neighbour_sums(
    messages: Tensor | None,
    nodes: Tensor | None,
    bonds: Bonds,
    scale: Tensor | None,
    outgoing: bool,
    own: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the same as the reference; see `bevatron.kernels.molecule.neighbour_sums`."""
    scale = None if scale is None else scale.detach()
    lists = (bonds.senders, bonds.receivers, bonds.incoming, bonds.incoming_ptr)
    given = (messages, nodes, scale, *lists)
    prepared = [None if tensor is None else tensor.contiguous() for tensor in given]
    found: tuple[Tensor, Tensor | None, Tensor | None] = _Sums.apply(*prepared, outgoing, own)
    return found


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        messages: Tensor | None,
        nodes: Tensor | None,
        scale: Tensor | None,
        senders: Tensor,
        receivers: Tensor,
        incoming: Tensor,
        incoming_ptr: Tensor,
        outgoing: bool,
        own: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        lists = (scale, senders, receivers, incoming, incoming_ptr)
        ctx.save_for_backward(*lists)
        ctx.set_materialize_grads(False)
        ctx.outgoing, ctx.own, ctx.widths = outgoing, own, _widths(messages, nodes)
        return gather(messages, nodes, *lists, outgoing, own), messages, nodes

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, more_messages: Tensor | None, more_nodes: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        more = [None if m is None else m.contiguous() for m in (more_messages, more_nodes)]
        if dout is None:
            return (*more, *(None,) * 7)
        found = gather_backward(
            dout.contiguous(), *ctx.saved_tensors, *more, *ctx.widths, ctx.outgoing, ctx.own
        )
        return (
            *(d if width else None for d, width in zip(found, ctx.widths, strict=True)),
            *(None,) * 7,
        )


def _new_sums(
    messages: Tensor | None, nodes: Tensor | None, incoming_ptr: Tensor, outgoing: bool, own: bool
) -> Tensor:
    width = 0 if messages is None else messages.shape[1] * (1 + outgoing)
    width += 0 if nodes is None else nodes.shape[1] * (1 + own)
    given = nodes if messages is None else messages
    assert given is not None
    return given.new_empty((incoming_ptr.shape[0] - 1, width))


@custom_op("neighbour_sums", fake=_new_sums)
def gather(
    messages: Tensor | None,
    nodes: Tensor | None,
    scale: Tensor | None,
    senders: Tensor,
    receivers: Tensor,
    incoming: Tensor,
    incoming_ptr: Tensor,
    outgoing: bool,
    own: bool,
) -> Tensor:
    """Return the sums concatenated."""
    del receivers
    out = _new_sums(messages, nodes, incoming_ptr, outgoing, own)
    launch_gather(
        messages, nodes, senders, incoming, incoming_ptr, out, scale=scale, outgoing=outgoing,
        copy=own,
    )  # fmt: skip
    return out


def _new_gradients(
    dout: Tensor, senders: Tensor, incoming_ptr: Tensor, channels: int, node_channels: int
) -> tuple[Tensor, Tensor]:
    return (
        dout.new_empty((senders.shape[0], channels)),
        dout.new_empty((incoming_ptr.shape[0] - 1, node_channels)),
    )


@custom_op("neighbour_sums_backward", fake=_new_gradients)
def gather_backward(
    dout: Tensor,
    scale: Tensor | None,
    senders: Tensor,
    receivers: Tensor,
    incoming: Tensor,
    incoming_ptr: Tensor,
    more_messages: Tensor | None,
    more_nodes: Tensor | None,
    channels: int,
    node_channels: int,
    outgoing: bool,
    own: bool,
) -> tuple[Tensor, Tensor]:
    """Return gradients of messages and nodes, empty for absent ones.

    ``more_messages`` and ``more_nodes`` are added to them.
    """
    dmessages, dnodes = _new_gradients(dout, senders, incoming_ptr, channels, node_channels)
    if dmessages.numel():
        pad = triton.next_power_of_2(channels)
        block = max(1, ELEMENTS // 2 // pad)
        neighbour_sums_backward[(triton.cdiv(len(senders), block),)](
            *(dout, *pointers(dout, scale, more_messages)), *(senders, receivers, dmessages),
            *(len(senders), dout.stride(0)),
            C=channels, C_PAD=pad, BLOCK=block, OUTGOING=outgoing, SCALED=scale is not None,
            MORE=more_messages is not None, WIDE=accumulator(dout),
            num_warps=4,
        )  # fmt: skip
    if node_channels:
        first = channels * (1 + outgoing)
        around = dout[:, first : first + node_channels]
        mine = dout[:, first + node_channels :] if own else None
        launch_gather(
            None, around, senders, incoming, incoming_ptr, dnodes, add=mine, more=more_nodes
        )
    return dmessages, dnodes


def launch_gather(
    messages: Tensor | None,
    nodes: Tensor | None,
    senders: Tensor,
    incoming: Tensor,
    incoming_ptr: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None = None,
    outgoing: bool = True,
    copy: bool = False,
    add: Tensor | None = None,
    more: Tensor | None = None,
) -> None:
    """Write all sums; ``copy`` appends the nodes, ``add`` adds rows to the sum over neighbours.

    Messages and ``more`` are contiguous; rows of nodes, and of ``add`` with the same stride, may
    have gaps.
    """
    num_atoms = len(incoming_ptr) - 1
    if not num_atoms:
        return
    channels, node_channels = _widths(messages, nodes)
    pads = [triton.next_power_of_2(max(width, 1)) for width in (channels, node_channels)]
    row = (1 + outgoing) * pads[0] * (channels > 0) + pads[1] * (node_channels > 0)
    block = min(triton.next_power_of_2(max(1, ELEMENTS // max(row, 1)) // 2 + 1), MOST_ATOMS)
    own = nodes if copy else add
    neighbour_sums_kernel[(triton.cdiv(num_atoms, block),)](
        *pointers(out, messages, nodes, own, more, scale),
        *(senders, incoming, incoming_ptr, out, num_atoms),
        *(0 if nodes is None else nodes.stride(0), out.stride(0)),
        C=channels, C_PAD=pads[0], D=node_channels, D_PAD=pads[1], BLOCK=block,
        MESSAGES=messages is not None, OUTGOING=outgoing, NODES=nodes is not None,
        COPY=copy and nodes is not None, ADD=add is not None, MORE=more is not None,
        SCALED=scale is not None, WIDE=accumulator(out),
        num_warps=4,
    )  # fmt: skip


def _widths(messages: Tensor | None, nodes: Tensor | None) -> tuple[int, int]:
    """Return the channels of both, 0 if absent."""
    channels, node_channels = (
        0 if given is None else given.shape[1] for given in (messages, nodes)
    )
    return channels, node_channels
