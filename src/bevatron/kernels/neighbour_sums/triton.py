"""Sums over the bonds of every atom in Triton: two custom operators and their launches."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.bonds import Bonds
from bevatron.kernels.layer_norm.triton import on_device
from bevatron.kernels.neighbour_sums.triton_kernels import (
    neighbour_sums_backward,
    neighbour_sums_kernel,
)

ELEMENTS = 4096
"""Numbers that a program adds up at once: as many as fit its registers."""


def neighbour_sums(
    messages: Tensor | None,
    nodes: Tensor | None,
    bonds: Bonds,
    scale: Tensor | None,
    outgoing: bool,
    own: bool,
) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.neighbour_sums`."""
    messages = None if messages is None else messages.contiguous()
    nodes = None if nodes is None else nodes.contiguous()
    scale = None if scale is None else scale.detach().contiguous()
    lists = (bonds.senders, bonds.receivers, bonds.incoming, bonds.incoming_ptr)
    result: Tensor = gather(
        messages, nodes, scale, *(index.contiguous() for index in lists), outgoing, own
    )
    return result


@torch.library.custom_op("bevatron::neighbour_sums", mutates_args=())
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
    """Return the sums side by side."""
    del receivers
    out = _new_sums(messages, nodes, incoming_ptr, outgoing, own)
    launch_gather(
        messages, nodes, senders, incoming, incoming_ptr, out, scale=scale, outgoing=outgoing,
        copy=own,
    )  # fmt: skip
    return out


@gather.register_fake
def _(
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
    del scale, senders, receivers, incoming
    return _new_sums(messages, nodes, incoming_ptr, outgoing, own)


@torch.library.custom_op("bevatron::neighbour_sums_backward", mutates_args=())
def gather_backward(
    dout: Tensor,
    scale: Tensor | None,
    senders: Tensor,
    receivers: Tensor,
    incoming: Tensor,
    incoming_ptr: Tensor,
    channels: int,
    node_channels: int,
    outgoing: bool,
    own: bool,
) -> tuple[Tensor, Tensor]:
    """Return gradients of messages and nodes, without elements where there were none."""
    dmessages = dout.new_empty((len(senders), channels))
    if dmessages.numel():
        pad = triton.next_power_of_2(channels)
        block = max(1, ELEMENTS // 2 // pad)
        with on_device(dout):
            neighbour_sums_backward[(triton.cdiv(len(senders), block),)](
                *(dout, dout if scale is None else scale, senders, receivers, dmessages),
                *(len(senders), dout.stride(0)),
                C=channels,
                C_PAD=pad,
                BLOCK=block,
                OUTGOING=outgoing,
                SCALED=scale is not None,
                WIDE=_wide(dout),
                num_warps=4,
            )
    dnodes = dout.new_empty((len(incoming_ptr) - 1, node_channels))
    if node_channels:
        first = channels * (1 + outgoing)
        around = dout[:, first : first + node_channels]
        mine = dout[:, first + node_channels :] if own else None
        launch_gather(None, around, senders, incoming, incoming_ptr, dnodes, add=mine)
    return dmessages, dnodes


@gather_backward.register_fake
def _(
    dout: Tensor,
    scale: Tensor | None,
    senders: Tensor,
    receivers: Tensor,
    incoming: Tensor,
    incoming_ptr: Tensor,
    channels: int,
    node_channels: int,
    outgoing: bool,
    own: bool,
) -> tuple[Tensor, Tensor]:
    del scale, receivers, incoming, outgoing, own
    return (
        dout.new_empty((senders.shape[0], channels)),
        dout.new_empty((incoming_ptr.shape[0] - 1, node_channels)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    messages, nodes, *tensors, ctx.outgoing, ctx.own = inputs
    ctx.widths = tuple(0 if given is None else given.shape[1] for given in (messages, nodes))
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    channels, node_channels = ctx.widths
    dmessages, dnodes = gather_backward(
        *(dout.contiguous(), *ctx.saved_tensors, channels, node_channels, ctx.outgoing, ctx.own)
    )
    return (
        dmessages if channels else None,
        dnodes if node_channels else None,
        *(None,) * 7,
    )


gather.register_autograd(_backward, setup_context=_save)


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
) -> None:
    """Write all sums; ``copy`` the nodes behind them, or ``add`` rows to the sum over neighbours.

    Messages are contiguous; rows of nodes, and of ``add`` with the same stride, may have gaps.
    """
    num_atoms = len(incoming_ptr) - 1
    if not num_atoms:
        return
    channels, node_channels = (
        0 if given is None else given.shape[1] for given in (messages, nodes)
    )
    pads = [triton.next_power_of_2(max(width, 1)) for width in (channels, node_channels)]
    row = (1 + outgoing) * pads[0] * (channels > 0) + pads[1] * (node_channels > 0)
    block = triton.next_power_of_2(max(1, ELEMENTS // max(row, 1)) // 2 + 1)
    own = nodes if copy else add
    with on_device(out):
        neighbour_sums_kernel[(triton.cdiv(num_atoms, block),)](
            *(_given(given, out) for given in (messages, nodes, own, scale)),
            *(senders, incoming, incoming_ptr, out, num_atoms),
            *(0 if nodes is None else nodes.stride(0), out.stride(0)),
            C=channels,
            C_PAD=pads[0],
            D=node_channels,
            D_PAD=pads[1],
            BLOCK=block,
            MESSAGES=messages is not None,
            OUTGOING=outgoing,
            NODES=nodes is not None,
            COPY=copy and nodes is not None,
            ADD=add is not None,
            SCALED=scale is not None,
            WIDE=_wide(out),
            num_warps=4,
        )


def _new_sums(
    messages: Tensor | None, nodes: Tensor | None, incoming_ptr: Tensor, outgoing: bool, own: bool
) -> Tensor:
    width = 0 if messages is None else messages.shape[1] * (1 + outgoing)
    width += 0 if nodes is None else nodes.shape[1] * (1 + own)
    given = nodes if messages is None else messages
    assert given is not None
    return given.new_empty((incoming_ptr.shape[0] - 1, width))


def _given(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Give a pointer to something that the kernel will not read where there is nothing."""
    return stand_in if tensor is None else tensor


def _wide(tensor: Tensor) -> Any:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32
