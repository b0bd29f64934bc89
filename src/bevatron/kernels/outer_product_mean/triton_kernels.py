"""The kernel that orders outer products by pairs of residues, and back."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def regroup_kernel(Source, Target, length, H: tl.constexpr, BLOCK: tl.constexpr,
                   BACK: tl.constexpr):  # fmt: skip
    """Copy [i, H, N, H] into [i, N, H, H], or back; a program has BLOCK elements of one line i.

    The elements of a program follow each other on the side of the pairs.
    """
    line = tl.program_id(1).to(tl.int64) * length * H * H
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < length * H * H
    pair, channel = e // (H * H), e // H % H
    by_channel = line + (channel * length + pair) * H + e % H
    by_pair = line + e
    if BACK:
        value = tl.load(Source + by_pair, mask=inside)
        tl.store(Target + by_channel, value, mask=inside)
    else:
        value = tl.load(Source + by_channel, mask=inside)
        tl.store(Target + by_pair, value, mask=inside)
