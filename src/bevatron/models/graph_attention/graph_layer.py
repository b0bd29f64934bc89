"""The base class of graph layers: Phi, heads, biases and activation.

H' = sigma(Phi(sum over the edges of Psi times H)), Besta et al., SC 2023, equation 1. A layer
defines the sum over the edges; everything else is here.

n vertices; H is the number of heads in shapes, the input features elsewhere; in and out are the
widths of the input and of one head's result.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.spmm import spmm
from bevatron.kernels.shared.dtypes import wide
from bevatron.models.graph_attention.matrix import Attends, Matrix

Activation = Callable[[Tensor], Tensor]
Combine = Literal["concat", "mean"]
Features = Tensor | Csr
"""Node features: dense [n, in], or a sparse matrix n x in with its values."""

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of `torch.compile`.

    Like `torch.compiler.disable`, but that imports torch._dynamo when a function is defined, which
    takes seconds even if nothing is ever compiled.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call


class GraphLayer(nn.Module):
    """Phi, heads, biases and activation around a sum over the edges.

    Parameters
    ----------
    inputs, outputs : widths of H and of one head's result
    learned : shapes of the scores' parameters, by name; the first axis is heads
    initial : initial values of learned scalars, by name
    phi
        ``"linear"``: a learned matrix for each head; a module from [n, inputs] to [n, outputs],
        used as it is; None: nothing.
    activation : applied to the result
    heads, combine : heads with weights of their own, concatenated or averaged
    bias : add a learned vector after the aggregation (not with a module as ``phi``)
    inner_bias : add a learned vector to X itself, before the aggregation
    input_dropout
        Probability that an element of H is dropped while training, drawn for each head separately.
    own_glorot : initialise each head as a layer of its own
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        learned: Mapping[str, tuple[int, ...]],
        initial: Mapping[str, float] | None = None,
        phi: nn.Module | Literal["linear"] | None = "linear",
        activation: Activation | None = None,
        heads: int = 1,
        combine: Combine = "concat",
        bias: bool = True,
        inner_bias: bool = False,
        input_dropout: float = 0.0,
        own_glorot: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.heads = inputs, outputs, heads
        self.combine, self.activation = combine, activation
        self.input_dropout, self.own_glorot = input_dropout, own_glorot
        self._initial = dict(initial or {})
        module = phi if isinstance(phi, nn.Module) else None
        self.phi = module
        has_matrix = phi == "linear"
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs)) if has_matrix else None
        width = outputs * (heads if combine == "concat" else 1)
        self.bias = nn.Parameter(torch.empty(width)) if bias and module is None else None
        self.inner_bias = nn.Parameter(torch.empty(heads, outputs)) if inner_bias else None
        self.learned = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape)) for name, shape in learned.items()}
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise matrices and vectors with Glorot's scheme; reset scalars and biases."""
        together = 1 if self.own_glorot else self.heads
        with torch.no_grad():
            if self.weight is not None:
                _glorot(self.weight, self.inputs, together * self.outputs)
            for name, parameter in self.learned.items():
                if name in self._initial:
                    parameter.fill_(self._initial[name])
                elif name.startswith("bias"):
                    parameter.zero_()
                elif parameter.ndim == 2:
                    _glorot(parameter, together, parameter.shape[1])
                else:
                    _glorot(parameter, parameter.shape[1], together * parameter.shape[2])
            for bias in (self.bias, self.inner_bias):
                if bias is not None:
                    bias.zero_()
        if isinstance(self.phi, nn.Module):
            for module in self.phi.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()

    @not_compiled
    def forward(self, csr: Matrix, features: Float[Tensor, "n inputs"] | Csr) -> Tensor:
        """Compute H' [n, _] from a square matrix, whose row i attends to its columns, and H.

        On a partitioned graph, H and H' are of this rank's vertices.
        """
        n = csr.shape[0]
        if csr.shape[1] != n or tuple(features.shape) != (n, self.inputs):
            raise ValueError(
                f"{type(self).__name__}: features {tuple(features.shape)} do not go with a graph "
                f"of shape {csr.shape} and inputs={self.inputs}"
            )
        return self._finish(self.attend(csr, features))

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n H out"]:
        """Compute Z, the sum over the edges and Phi, before heads are combined."""
        raise NotImplementedError

    def explain(self, *, weighted: bool = False) -> str:
        """Explain how the layer is computed on graphs with or without edge values, and why."""
        raise NotImplementedError

    def attends(self, *, weighted: bool = False) -> Attends:
        """Return the layer's requirement on a partition, with or without edge values."""
        raise NotImplementedError

    def matrix(self) -> Tensor | None:
        """Return Phi's matrix [H, in, out], if it has one."""
        return self.phi.weight.T[None] if isinstance(self.phi, nn.Linear) else self.weight

    def project(self, features: Features) -> Float[Tensor, "n H out"]:
        """Compute X = Phi(H), without the bias that is added after the aggregation."""
        matrix = self.matrix()
        if matrix is None:
            dense = dense_features(features)
            return (dense if self.phi is None else self.phi(dense))[:, None]
        if self.training and self.input_dropout:
            return self._project_dropped(features, matrix)
        heads, inputs, outputs = matrix.shape
        flat = matrix.transpose(0, 1).reshape(inputs, heads * outputs)
        x = sparse_product(features, flat) if isinstance(features, Csr) else features @ flat
        x = x.reshape(-1, heads, outputs)
        return x if self.inner_bias is None else x + self.inner_bias.to(x.dtype)

    def _project_dropped(self, features: Features, matrix: Tensor) -> Tensor:
        """Compute X, [n, H, out], with dropout of the inputs drawn for each head."""
        heads, p = matrix.shape[0], self.input_dropout
        if isinstance(features, Tensor):
            x = F.dropout(features.expand(heads, -1, -1), p) @ matrix
            return x.transpose(0, 1).contiguous()
        dropped = F.dropout(stored_values(features).expand(heads, -1), p)
        parts = [
            sparse_product(features.with_values(own), matrix[head].contiguous())
            for head, own in enumerate(dropped.unbind(0))
        ]
        return torch.stack(parts, dim=1)

    def project_sum(self, summed: Float[Tensor, "n _ in"]) -> Float[Tensor, "n H out"]:
        """Apply Phi after the aggregation."""
        matrix = self.matrix()
        if matrix is not None:
            summed = summed.expand(-1, matrix.shape[0], -1)
            return torch.einsum("nhk,hkj->nhj", summed, matrix)
        return summed if self.phi is None else self.phi(summed[:, 0])[:, None]

    def _finish(self, z: Tensor) -> Tensor:
        z = z.flatten(1) if self.combine == "concat" else z.mean(1)
        bias = self.phi.bias if isinstance(self.phi, nn.Linear) else self.bias
        if bias is not None:
            z = z + bias.to(z.dtype)
        return z if self.activation is None else self.activation(z)


def scores(x: Float[Tensor, "n _ k"], vector: Float[Tensor, "H k"]) -> Float[Tensor, "n H"]:
    """Multiply rows by each head's vector, in at least float32 even under autocast."""
    with torch.autocast(x.device.type, enabled=False):
        rows = wide(x)
        return torch.einsum("nhk,hk->nh", rows, vector.to(rows.dtype))


def sparse_product(features: Csr, matrix: Tensor) -> Tensor:
    """Multiply sparse features by a matrix, in 16 bits where autocast would multiply dense ones."""
    device = matrix.device.type
    if torch.is_autocast_enabled(device):
        matrix = matrix.to(torch.get_autocast_dtype(device))
    return spmm(features, matrix)


def stored_values(features: Csr) -> Tensor:
    """Return the values of sparse features, ones where there are none."""
    values = features.values
    return torch.ones(features.nnz, device=features.device) if values is None else values


def dense_features(features: Features) -> Tensor:
    """Return features as a dense tensor."""
    if isinstance(features, Tensor):
        return features
    values = stored_values(features)
    place = (features.row_index.long(), features.col.long())
    return values.new_zeros(features.shape).index_put(place, values)


def _glorot(parameter: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    parameter.uniform_(-bound, bound)
