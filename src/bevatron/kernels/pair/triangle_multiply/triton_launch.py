"""Launches of the triangle multiplication's kernels, prepared once for each layout of the pair."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from bevatron.kernels.pair.triangle_multiply.tiles import choose
from bevatron.kernels.pair.triangle_multiply.triton_output import (
    output_input_kernel,
    output_kernel,
)
from bevatron.kernels.pair.triangle_multiply.triton_project import (
    project_input_kernel,
    project_kernel,
)
from bevatron.kernels.pair.triangle_multiply.triton_weights import (
    finish_output_kernel,
    joint_kernel,
    output_weights_kernel,
    round_kernel,
    sum_norms_kernel,
)
from bevatron.kernels.shared.launch import cache_bytes, num_sms
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.rows import as_rows
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import Launch
from bevatron.kernels.shared.triton_math import allows_tf32
from bevatron.kernels.shared.triton_partial_sums import (
    LAYER_BLOCK_C,
    PAIR_BLOCK,
    SUM_BLOCK_C,
    finish_layer_kernel,
    layer_blocks,
)

LARGEST_WIDTH = 256
FEWEST_BLOCKS = 4
"""Fewest blocks of rows over which a program accumulates weight gradients."""
ROUNDED = 1024
"""Weights that a program rounds."""
ALIGNED, WELL_ALIGNED = 8, 16
"""Elements. cuBLAS needs rows aligned to the first. Lines that must be padded are padded to the
second: Triton specialises on multiples of 16 only, and then loads eight elements at a time."""

HOPPER = (9, 0)
"""Compute capability of the GPUs that `triton_hopper` is for."""
HOPPER_WIDTH, HOPPER_TILE = 128, 64
FEWEST_TILES = 1024
"""With fewer tiles, bringing the weights to every SM's shared memory takes longer than it saves."""


def padded(length: int) -> int:
    """Round the length of a line of columns up to an aligned one."""
    return length if length % ALIGNED == 0 else -(-length // WELL_ALIGNED) * WELL_ALIGNED


def pad(width: int) -> int:
    """Round channels up to a power of two that a matmul supports."""
    return max(16, 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class Pair:
    """Layout of a pair's rows, in its own memory and in tensors with channels outermost.

    Attributes
    ----------
    is_readable : whether kernels read the pair in place; they need a copy otherwise
    device, dtype : device and type of the pair
    batch, C, H : pairs, channels of the pair and of the contraction
    geometry : sizes and strides of the axes of rows
    axes : how many of these axes there are
    lines, length, padded : R, N, and N rounded up to what is aligned
    tf32 : whether float32 matmuls use TF32
    """

    is_readable: bool
    device: torch.device
    dtype: torch.dtype
    batch: int
    C: int
    H: int
    geometry: tuple[int, int, int, int, int]
    axes: int
    lines: int
    length: int
    padded: int
    tf32: bool

    @classmethod
    def of(cls, z: Tensor, norm_out_weight: Tensor, tf32: bool = False) -> "Pair":
        """Describe a pair."""
        given, N = z, z.shape[-2]
        z = z if z.stride(-1) == 1 else z.contiguous()
        rows = as_rows(z)
        s0, s1, s2, _ = rows.strides[0]
        return cls(
            is_readable=z is given and rows.in_place,
            device=z.device,
            dtype=z.dtype,
            batch=z.shape[:-3].numel(),
            C=z.shape[-1],
            H=len(norm_out_weight),
            geometry=(*rows.sizes, s0, s1, s2),
            axes=rows.axes,
            lines=z.shape[-3],
            length=N,
            padded=padded(N),
            tf32=tf32,
        )

    def planes(self, z: Tensor, channels: int) -> Tensor:
        """Allocate a tensor with channels outermost, as matrices [channels batch, R, N padded]."""
        return z.new_empty((channels * self.batch, self.lines, self.padded))

    def matrices(self, planes: Tensor) -> Tensor:
        """View a tensor with channels outermost as [channels batch, R, N]."""
        return planes if self.length == self.padded else planes[:, :, : self.length]

    @property
    def places(self) -> tuple[int, int, int]:
        """N, N padded and the elements of a channel."""
        return self.length, self.padded, self.batch * self.lines * self.padded

    @property
    def edges(self) -> int:
        """Rows of one pair."""
        return self.lines * self.length

    @property
    def exceeds_cache(self) -> bool:
        """Whether kernels find in the L2 little of what an earlier one wrote."""
        return self.C * self.places[2] * self.dtype.itemsize > cache_bytes(self.device)

    def tiles(self, kernel: str) -> Tiles:
        """Look up the tiles of a kernel."""
        return choose(kernel, max(pad(self.C), pad(self.H)), self.dtype.itemsize)

    def fullest(self, *kernels: str) -> str:
        """Name the tiles whose last programs leave least of a device idle; of equals the first."""

        def rows(kernel: str) -> int:
            tiles = self.tiles(kernel)
            at_once = tiles.rows * tiles.per_sm * num_sms(self.device)
            return -(-self.places[2] // at_once) * tiles.rows

        return min(kernels, key=rows)

    def launch(self, kernel: Any, name: str, numbers: Sequence[float], **constants: Any) -> Launch:
        """Prepare a launch with one program per block of columns."""
        tiles = self.tiles(name)
        programs = -(-self.places[2] // tiles.rows)
        return Launch(kernel, (programs,), numbers, **constants, **self.constants(tiles))

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Return the compile-time constants of all kernels."""
        return tiles.register_limit(self.device) | {
            "C": self.C,
            "C_PAD": pad(self.C),
            "BLOCK": tiles.rows,
            "BLOCK_H": tiles.columns,
            "PADDED": self.length != self.padded,
            "STAGES": tiles.stages,
            "PRECISION": "tf32" if self.tf32 else "ieee",
            "num_warps": tiles.warps,
        }


def on_hopper(
    pair: Pair,
    eps: float,
    joint_bias: Tensor | None,
    out_bias: Tensor | None,
    mask: Tensor | None,
    drop: Tensor | None,
    residual: bool,
) -> dict[str, Any]:
    """Return launches of `triton_hopper` in place of those of the same names; none if it cannot."""
    N, _, plane = pair.places
    fits = pair.C == pair.H == HOPPER_WIDTH and pair.dtype.itemsize == 2
    fits = fits and pair.axes == 1 and pair.geometry[-1] == pair.C and pair.padded == N
    fits = fits and plane % HOPPER_TILE == 0 and FEWEST_TILES <= plane // HOPPER_TILE < 2**24
    if not (fits and is_hopper(pair.device)):
        return {}
    from bevatron.kernels.pair.triangle_multiply.triton_hopper import (
        hopper_output_kernel,
        hopper_project_kernel,
    )
    from bevatron.kernels.pair.triangle_multiply.triton_hopper_input import (
        hopper_project_input_kernel,
    )

    grid = (num_sms(pair.device),)
    masked: dict[str, Any] = {"HAS_BIAS": joint_bias is not None, "HAS_MASK": mask is not None}
    of_out = {"HAS_BIAS": out_bias is not None, "HAS_DROP": drop is not None, "RESIDUAL": residual}
    three_groups, two_groups = {"REGISTERS": 168}, {"REGISTERS": 240}
    return {
        "project": Launch(
            hopper_project_kernel,
            grid,
            (eps, plane),
            CHUNK=32,
            **masked,
            **three_groups,
        ),
        "output": Launch(
            hopper_output_kernel,
            grid,
            (eps, N, plane, pair.edges),
            CHUNK=32,
            **of_out,
            **three_groups,
        ),
        "project_input": Launch(
            hopper_project_input_kernel,
            grid,
            (plane,),
            RESIDUAL=residual,
            CHUNK=16,
            **masked,
            **two_groups,
        ),
    }


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device runs `triton_hopper`, with a Triton that is known to compile it."""
    if device.type != "cuda" or triton.knobs.runtime.interpret or torch.version.hip is not None:
        return False
    if not torch.cuda.is_available():  # a step is planned for a GPU
        return False
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = version in {(3, 6), (3, 7), (3, 8)}
    return known and torch.cuda.get_device_capability(device) == HOPPER


@dataclass(frozen=True)
class LayerSums:
    """Launches of the sums over rows that give the gradients of linear layers.

    Attributes
    ----------
    shares
        Shape of every layer's partial sums over rows: of d xhat^T [channels C], and of d
        [channels]. xhat are the normalised rows, without the norm's weight and bias.
    weigh : the launch
    """

    shares: tuple[tuple[int, int], ...]
    weigh: Launch

    @classmethod
    def of(
        cls, pair: Pair, kernel: Any, channels: int, *widths: int, **constants: Any
    ) -> "LayerSums":
        """Prepare the launch for layers of as many channels each, on rows of these widths."""
        tiles = pair.tiles("weight")
        blocks = len(widths) * -(-channels // tiles.columns)
        # As many programs as run at once share the columns.
        most = max(1, tiles.per_sm * num_sms(pair.device) // blocks)
        columns = -(-pair.places[2] // (most * tiles.rows)) * tiles.rows
        # With a small pair, fewer blocks would make the partial sums larger than everything else.
        columns = max(columns, FEWEST_BLOCKS * tiles.rows) if columns else 0
        parts = -(-pair.places[2] // columns) if columns else 0
        weigh = Launch(
            kernel,
            (blocks, parts),
            (channels, columns, *pair.geometry, *pair.places),
            AXES=pair.axes,
            FULL=channels % tiles.columns == 0,
            **pair.constants(tiles),
            **constants,
        )
        return cls(tuple((parts, channels * (C + 1)) for C in widths), weigh)

    def __call__(self, *layers: tuple[Tensor, Tensor, Sequence[Tensor]]) -> list[Tensor]:
        """Return every layer's partial sums, of its gradients, rows and their statistics."""
        parts = [
            d.new_empty(shape, dtype=torch.float32)
            for (d, _, _), shape in zip(layers, self.shares, strict=True)
        ]
        given: list[Tensor] = []
        for (d, x, known), to in zip(layers, parts, strict=True):
            given += (d, x, *known, to)
        self.weigh(*given)
        return parts


@dataclass(frozen=True)
class Launches:
    """All launches for a pair, in the order of the passes, and the size of its joined weights."""

    sizes: tuple[int, int, int]
    rounded: Launch
    project: Launch
    output: Launch
    output_input: Launch
    of_output: LayerSums
    finish_output: Launch
    project_input: Launch
    of_joint: LayerSums
    finish_joint: Launch
    sum_norms: Launch
    from_pair: bool = False
    """Whether `project_input` normalises the pair again and reads no normalised rows."""


@per_layout
def prepare(
    z: Tensor,
    mask: Tensor | None,
    drop: Tensor | None,
    norm_out_weight: Tensor,
    joint_bias: Tensor | None,
    out_bias: Tensor | None,
    eps: float,
    residual: bool,
    tf32: bool,
) -> tuple[Pair, Launches]:
    """Describe a pair and prepare its launches."""
    pair = Pair.of(z, norm_out_weight, tf32)
    numbers, C, H = (*pair.geometry, *pair.places), pair.C, pair.H
    with_eps, axes = (*pair.geometry, eps, *pair.places), {"AXES": pair.axes}
    masked = {"HAS_BIAS": joint_bias is not None, "HAS_MASK": mask is not None, "H": H}
    of_out = {"HAS_BIAS": out_bias is not None, "HAS_DROP": drop is not None, "H": H}
    of_out |= {"H_PAD": pad(H), "PREFETCH": pair.exceeds_cache}
    sizes = (4 * H * C, C * H, C * C)
    of_output = LayerSums.of(pair, output_weights_kernel, C, H, C, H=H, H_PAD=pad(H))
    of_joint = LayerSums.of(pair, joint_kernel, 4 * H, C)

    def held(name: str) -> dict[str, bool]:
        return {"HOLD": pair.tiles(name).hold}

    launches = Launches(
        sizes=sizes,
        rounded=Launch(
            round_kernel, (-(-sum(sizes) // ROUNDED),), (H * C, *sizes[1:]), BLOCK=ROUNDED
        ),
        project=pair.launch(
            project_kernel, pair.fullest("project", "half_project"), with_eps, **masked, **axes
        ),
        output=pair.launch(
            output_kernel,
            "output",
            (*with_eps, pair.edges),
            RESIDUAL=residual,
            **of_out,
            **axes,
            **held("output"),
        ),
        output_input=pair.launch(
            output_input_kernel,
            "output_input",
            (*pair.places, pair.edges),
            **of_out,
            **held("output_input"),
        ),
        of_output=of_output,
        finish_output=Launch(
            finish_output_kernel,
            (2 * C, -(-max(C, H) // LAYER_BLOCK_C)),
            (of_output.shares[0][0],),
            C=C,
            H=H,
            HAS_BIAS=out_bias is not None,
            **layer_blocks(of_output.shares[0][0]),
        ),
        project_input=pair.launch(
            project_input_kernel,
            "project_input",
            numbers,
            RESIDUAL=residual,
            **masked,
            **axes,
        ),
        of_joint=of_joint,
        finish_joint=Launch(
            finish_layer_kernel,
            (4 * H, -(-C // LAYER_BLOCK_C)),
            (of_joint.shares[0][0],),
            K=4 * H,
            C=C,
            HAS_NORM_WEIGHT=True,
            HAS_NORM_BIAS=True,
            HAS_BIAS=joint_bias is not None,
            **layer_blocks(of_joint.shares[0][0]),
        ),
        sum_norms=Launch(
            sum_norms_kernel,
            (-(-max(C, H) // SUM_BLOCK_C), 4),
            C=C,
            H=H,
            BLOCK=min(PAIR_BLOCK, 1 << (C - 1).bit_length()),
            BLOCK_IN=min(PAIR_BLOCK, 1 << (C + 4 * H - 1).bit_length()),
            BLOCK_C=SUM_BLOCK_C,
            num_warps=8,
        ),
    )
    of_hopper = on_hopper(pair, eps, joint_bias, out_bias, mask, drop, residual)
    return pair, replace(launches, **of_hopper, from_pair=bool(of_hopper))


class Multiplication:
    """A pair with its weights, and the launches of both passes.

    Parameters
    ----------
    rounded : buffer into which `round_weights` writes the matrices in the type of the pair
    """

    def __init__(
        self,
        z: Tensor,
        mask: Tensor | None,
        drop: Tensor | None,
        norm_in: Sequence[Tensor],
        joint_bias: Tensor | None,
        norm_out: Sequence[Tensor],
        out_bias: Tensor | None,
        rounded: Tensor,
        eps: float,
        residual: bool,
    ) -> None:
        tf32 = z.dtype == torch.float32 and allows_tf32()
        self.pair, self.launches = prepare(
            z, mask, drop, norm_out[0], joint_bias, out_bias, eps, residual, tf32
        )
        self.z = z if self.pair.is_readable else z.contiguous()
        self.mask = self.z if mask is None else mask.contiguous()
        self.drop = self.z if drop is None else drop.contiguous()
        self.rounded = rounded
        self.joint, self.out, self.gate = rounded.split_with_sizes(self.launches.sizes)
        self.norm_in = norm_in[0].contiguous(), norm_in[1].contiguous()
        self.norm_out = norm_out[0].contiguous(), norm_out[1].contiguous()
        # Stand in for tensors that are not given.
        biases: tuple[Tensor, ...] = (self.joint, self.out, self.out)
        if joint_bias is not None:
            biases = joint_bias.to(z.dtype).contiguous(), *biases[1:]
        if out_bias is not None:
            biases = biases[0], *out_bias.to(z.dtype).contiguous().chunk(2)
        self.joint_bias, *self.out_biases = biases

    def round_weights(self, *matrices: Tensor) -> None:
        """Write the matrices: a, its gates, b, its gates, the output and its gate."""
        self.launches.rounded(*(matrix.contiguous() for matrix in matrices), self.rounded)

    def project(self, ab: Tensor, normed: Tensor, statistics: Sequence[Tensor]) -> None:
        """Write a and b, the normalised pair and the statistics of its rows."""
        given = self.z, *self.norm_in, self.joint, self.joint_bias, self.mask
        self.launches.project(*given, ab, normed, *statistics)

    def output(self, x: Tensor, normed: Tensor, y: Tensor, statistics: Sequence[Tensor]) -> None:
        """Write the result, and the statistics of the contraction's rows to the last two."""
        self.launches.output(x, normed, *self._output(), self.z, *statistics[2:], y)

    def output_input_backward(
        self,
        dy: Tensor,
        x: Tensor,
        normed: Tensor,
        statistics: Sequence[Tensor],
        dx: Tensor,
        dgate: Tensor,
        spare: Tensor,
    ) -> None:
        """Write dx and the gradient of the gate's linear layer as rows.

        ``spare`` [C, ...] receives the gradient of the output's linear layer.
        """
        given = dy, x, normed, *self._output(), *statistics[2:]
        self.launches.output_input(*given, dx, dgate, spare)

    def weigh_output(
        self,
        x: Tensor,
        statistics: Sequence[Tensor],
        dgate: Tensor,
        spare: Tensor,
        gradients: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Write the gradients behind the contraction: the output's and gate's weight, the biases.

        Returns partial gradients of both norms, the output's and the pair's. Of the latter the
        first C, the gate's, are written here.
        """
        dout, dgate_weight, dbias = gradients
        C, H, launches = self.pair.C, self.pair.H, self.launches
        parts, of_gate = launches.of_output(
            (spare, x, statistics[2:]), (dgate, self.z, statistics[:2])
        )
        shares = parts.new_empty(C, 2, H)
        in_shares = parts.new_empty(C + 4 * H, 2, C)
        launches.finish_output(
            *(parts, self.out, *self.norm_out, dout, shares),
            *(of_gate, self.gate, *self.norm_in, dgate_weight, in_shares, dbias),
        )
        return shares, in_shares

    def project_backward(
        self,
        dy: Tensor,
        d: Tensor,
        normed: Tensor,
        statistics: Sequence[Tensor],
        dz: Tensor,
        shares: tuple[Tensor, Tensor],
        dnorm_in: Sequence[Tensor],
        djoint: Tensor,
        djoint_bias: Tensor,
        dnorm_out: Sequence[Tensor],
    ) -> None:
        """Turn the gradient of the gate's linear layer in ``dz`` into dz.

        Write the other gradients too: of the joint weight and bias, and of both norms. ``d``
        [4 H, ...] holds the gradients of a (first quarter) and b (third); ``shares`` is what
        `weigh_output` returned.
        """
        launches, (of_out, of_in) = self.launches, shares
        rows = self.norm_in[1] if launches.from_pair else normed
        given = self.z, rows, self.norm_in[0], self.joint, self.joint_bias, self.mask
        launches.project_input(d, *given, self.gate, *statistics, dy, dz)
        (parts,) = launches.of_joint((d, self.z, statistics))
        written = djoint, djoint_bias, of_in[self.pair.C :]
        launches.finish_joint(parts, self.joint, *self.norm_in, *written)
        launches.sum_norms(of_out, *dnorm_out, of_in, *dnorm_in)

    def _output(self) -> tuple[Tensor, ...]:
        return *self.norm_out, self.out, self.gate, *self.out_biases, self.drop
