"""One declaration of a custom operator: its schema, its fake and its gradients.

A Triton launch is hidden from torch behind a custom operator. Such an operator is declared once::

    @custom_op("scale", fake="x")
    def forward(x: Tensor, factor: Tensor) -> Tensor: ...


    @forward.backward()
    def backward(dy: Tensor, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]: ...

The second is ``scale_backward``: its results look like the arguments of ``scale``, it names what it
needs from the forward pass by its own parameters, and it is wired to autograd.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from bevatron.kernels.shared.launch import AS_IT_IS, on_device

PLAIN = {Tensor, torch.nn.Parameter, list, float, int, bool, str, type(None)}
"""Argument types that do not intercept operators."""
KINDS = ("tensor", "value", "list")
"""What an argument can be."""
NEEDS = "needs"
"""Parameter of a formula that receives whether each gradient is needed."""
bodies: dict[str, Callable[..., Any]] = {}
"""The function behind each custom operator, by torch's name for it."""


def custom_op(
    name: str, *, fake: str | Callable[..., Any], outputs: str = ""
) -> Callable[[Callable[..., Any]], "CustomOp"]:
    """Declare the operator ``torch.ops.bevatron.NAME``; its schema is the function's signature.

    Parameters
    ----------
    name : without the namespace
    fake
        What the results look like: names of arguments of the same shape and type (None gives an
        empty result), or a function that allocates the results and takes arguments of the
        operator by name.
    outputs : names of the results, if a gradient formula takes some of them

    Examples
    --------
    >>> @custom_op("doctest_twice", fake="x")
    ... def twice(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> @twice.backward(fake="dy")
    ... def twice_backward(dy: Tensor) -> Tensor:
    ...     return 2 * dy
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(twice(x).sum(), x)
    (tensor([2., 2.]),)
    """
    return lambda function: CustomOp(name, function, fake, outputs.split())


class CustomOp:
    """A custom operator, called like its function; made by `custom_op`.

    Its function runs with the device of its first tensor as the current one.

    Calls go through the dispatcher only if something intercepts it (`is_watched`): with many
    arguments, a call through the dispatcher and its backward pass take a few hundred
    microseconds of host time.

    Attributes
    ----------
    op : the operator registered with torch
    parameters, outputs : names of arguments and results
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fake: str | Callable[..., Any],
        outputs: Sequence[str],
    ) -> None:
        run = _on_its_device(function)
        self.op = torch.library.custom_op(f"bevatron::{name}", run, mutates_args=())
        self.__name__, self.__doc__, self.__module__ = name, function.__doc__, function.__module__
        self.signature = inspect.signature(function)
        self.parameters, self.outputs = list(self.signature.parameters), list(outputs)
        self._places_of_tensors = [self.parameters.index(name) for name in self._tensors()]
        self.op.register_fake(_fake(self.parameters, fake))
        self._function = bodies[f"bevatron::{name}"] = run
        self._apply = _recorded(name, run, _keep_nothing, _only_once(name))

    def __call__(self, *arguments: Any) -> Any:
        """Compute the results, which autograd records if an argument requires gradients."""
        if is_watched(arguments):
            return self.op(*arguments)
        if torch.is_grad_enabled():
            for place in self._places_of_tensors:
                tensor = arguments[place]
                if tensor is not None and tensor.requires_grad:
                    return self._apply(*arguments)
        return self._function(*arguments)

    def backward(
        self,
        of: str = "",
        *,
        fake: str | Callable[..., Any] | None = None,
        outputs: str = "",
        asks: Mapping[str, str] | None = None,
        unpack: Callable[..., Any] | None = None,
    ) -> Callable[[Callable[..., Any]], "CustomOp"]:
        """Declare the operator that computes gradients: ``NAME_backward``, ``_double_backward``.

        Parameters
        ----------
        of, asks, unpack : see `gradients`
        fake, outputs
            See `custom_op`; without ``fake`` the results look like the arguments ``of``.
        """
        first_order = self.__name__.removesuffix("_backward")
        order = "backward" if first_order == self.__name__ else "double_backward"
        of = of or " ".join(self._tensors())

        def declare(function: Callable[..., Any]) -> CustomOp:
            made = CustomOp(
                f"{first_order}_{order}", function, of if fake is None else fake, outputs.split()
            )
            self.gradients(of, made, asks=asks, unpack=unpack)
            return made

        return declare

    def gradients(
        self,
        of: str,
        formula: "Callable[..., Any] | CustomOp",
        *,
        asks: Mapping[str, str] | None = None,
        unpack: Callable[..., Any] | None = None,
    ) -> None:
        """Register how gradients are computed.

        Parameters
        ----------
        of
            Names of the arguments that have gradients, in the order of the formula's results; all
            tensors if empty.
        formula
            Returns these gradients (a single one not in a tuple), or None for all. The result for
            an argument that was None is dropped. The first parameters receive the gradients of the
            operator's results, in order, under any names. The others are matched by name:
            results and arguments of the operator, which are saved, and ``needs``, a list that
            says which gradients the running backward pass uses (the others are dropped).
            Without ``needs`` all are computed.
        asks
            Flags among the formula's parameters, each with the argument whose gradient it requests.
        unpack : turns the formula's result into gradients
        """
        names = of.split() or self._tensors()
        wiring = _Wiring(self, names, formula, dict(asks or {}), unpack)
        self.register_autograd(wiring.backward, setup_context=wiring.save)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register gradients as `torch.library.register_autograd` does, if names do not suffice."""
        self.op.register_autograd(backward, setup_context=setup_context)
        self._apply = _recorded(self.__name__, self._function, setup_context, backward)

    def _tensors(self) -> list[str]:
        parameters = self.signature.parameters.values()
        return [each.name for each in parameters if _kind(each) == "tensor"]


def is_watched(arguments: tuple[Any, ...]) -> bool:
    """Whether something intercepts operators: a compiler, a mode or a tensor subclass."""
    # What `is_compiling` knows beyond this has a mode.
    if torch.compiler.is_dynamo_compiling():
        return True
    for argument in arguments:
        if type(argument) not in PLAIN and isinstance(argument, Tensor):
            return True
    # Neither has a public query.
    transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    return transformed or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001


def _is_used(ctx: Any, tensor: int) -> bool:
    """Whether the running backward pass uses the gradient of an argument that requires one.

    The forces of a potential are gradients with respect to positions alone; gradients of weights,
    which are required later, would be computed and thrown away. ``tensor`` is the argument's
    index among the tensors.
    """
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[tensor][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001
    except (AttributeError, RuntimeError):
        # An input of autograd.grad that is a leaf, or a torch without this feature.
        return True


class _Wiring:
    """Inputs of a backward formula from the forward pass, and the destinations of its results."""

    def __init__(
        self,
        op: CustomOp,
        of: list[str],
        formula: "Callable[..., Any] | CustomOp",
        asks: dict[str, str],
        unpack: Callable[..., Any] | None,
    ) -> None:
        places = {name: place for place, name in enumerate(op.parameters)}
        kinds = {name: _kind(each) for name, each in op.signature.parameters.items()}
        wanted = formula.parameters if isinstance(formula, CustomOp) else _parameters(formula)
        known = [n for n in wanted if n in {*places, *op.outputs, *asks, NEEDS}]
        self._num_gradients = len(wanted) - len(known)
        unknown = {*of, *asks.values()} - set(places)
        unknown |= {*wanted[self._num_gradients :], *asks} - set(known)
        if unknown:
            raise TypeError(
                f"{op.__name__}: a gradient takes {', '.join(sorted(unknown))}, which is neither "
                f"an argument ({', '.join(places)}) nor a result ({', '.join(op.outputs)})"
            )
        self._formula, self._unpack = formula, unpack
        self._of, self._count = [places[name] for name in of], len(places)
        self._lists = [places[name] for name, kind in kinds.items() if kind == "list"]
        # Places in `of` of the gradients that the formula can skip.
        asked = range(len(of)) if NEEDS in wanted else map(of.index, asks.values())
        self._asked = sorted(set(asked))
        # What the formula takes is picked from tensors and results, values, lists, and needs.
        given = [n for n in known if n in places and n not in {NEEDS, *asks, *op.outputs}]
        of_kind = {kind: [n for n in given if kinds[n] == kind] for kind in KINDS}
        results = [name for name in known if name in op.outputs]
        self._tensors = [places[name] for name in of_kind["tensor"]]
        self._results = [op.outputs.index(name) for name in results]
        self._values = [places[name] for name in of_kind["value"]]
        self._kept_lists = [places[name] for name in of_kind["list"]]
        sources = [*of_kind["tensor"], *results, *of_kind["value"], *of_kind["list"], NEEDS]
        first = len(sources)
        self._sources = [
            first + of.index(asks[name]) if name in asks else sources.index(name) for name in known
        ]

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the formula needs."""
        several = isinstance(output, tuple)
        kept = [inputs[place] for place in self._tensors]
        kept += [output[place] if several else output for place in self._results]
        for place in self._kept_lists:
            kept += inputs[place]
        ctx.save_for_backward(*kept)
        # Attributes that are set and never read cost every call host time.
        if self._values:
            ctx.values = [inputs[place] for place in self._values]
        if self._lists:
            ctx.lengths = [len(inputs[place]) for place in self._kept_lists]
            ctx.of_lists = [(place, len(inputs[place])) for place in self._lists]
        if self._asked:
            ctx.tensors = [
                sum(isinstance(each, Tensor) for each in inputs[: self._of[asked]])
                for asked in self._asked
            ]
        ctx.set_materialize_grads(False)
        if several and len(output) > self._num_gradients:
            ctx.mark_non_differentiable(*output[self._num_gradients :])

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Call the formula and assign its gradients to their arguments."""
        placed: list[Any] = [None] * self._count
        if self._lists:
            for place, length in ctx.of_lists:
                placed[place] = [None] * length
        grads = grads[: self._num_gradients]
        required = ctx.needs_input_grad
        needs = [required[place] for place in self._of]
        if self._asked:
            for asked, tensor in zip(self._asked, ctx.tensors, strict=True):
                needs[asked] = needs[asked] and _is_used(ctx, tensor)
        if True not in needs or (grads[0] is None and all(grad is None for grad in grads)):
            return tuple(placed)
        found = self._formula(*grads, *self._take(ctx, needs))
        if found is None:
            return tuple(placed)
        if not isinstance(found, tuple):
            found = (found,)
        if self._unpack is not None:
            found = self._unpack(*found)
        for place, gradient, needed in zip(self._of, found, needs, strict=True):
            if needed:
                placed[place] = gradient
        return tuple(placed)

    def _take(self, ctx: Any, needs: list[bool]) -> list[Any]:
        given = list(ctx.saved_tensors)  # only once: checkpointing hands out a tensor once
        if self._kept_lists:
            first = len(self._tensors) + len(self._results)
            given, tensors = given[:first], given[first:]
        if self._values:
            given += ctx.values
        if self._kept_lists:
            first = 0
            for length in ctx.lengths:
                given.append(tensors[first : first + length])
                first += length
        given.append(needs)
        given += needs
        return [given[place] for place in self._sources]


def _fake(parameters: list[str], fake: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of all arguments that allocates results."""
    names = fake.split() if isinstance(fake, str) else _parameters(fake)
    places = [parameters.index(name) for name in names]
    if not isinstance(fake, str):
        return lambda *arguments: fake(*[arguments[place] for place in places])

    def like(*arguments: Any) -> Any:
        first = next(each for each in arguments if isinstance(each, Tensor))
        found = [
            first.new_empty(0) if each is None else each.new_empty(each.shape)
            for each in (arguments[place] for place in places)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    return like


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function on the device of its first tensor, where Triton launches kernels.

    Without autocast: what it multiplies has types that its buffers have too.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        first = arguments[0]
        if not isinstance(first, Tensor):
            first = next(each for each in arguments if isinstance(each, Tensor))
        if torch._C._is_any_autocast_enabled():  # noqa: SLF001
            with torch.autocast(first.device.type, enabled=False), on_device(first):
                return function(*arguments)
        device = on_device(first)
        if device is AS_IT_IS:
            return function(*arguments)
        with device:
            return function(*arguments)

    return run


def _recorded(
    name: str, function: Callable[..., Any], save: Callable[..., None], formula: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function that autograd records if the dispatcher is bypassed."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        outputs = function(*inputs)
        save(ctx, inputs, outputs)
        return outputs

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = formula(ctx, *grads)
        if list in map(type, found):
            return tuple(None if isinstance(each, list) else each for each in found)
        return found

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind = type(f"bevatron::{name}", (torch.autograd.Function,), methods)
    return unwatched(kind)


def unwatched(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies a function of autograd to arguments that `is_watched` has checked.

    Its own ``apply`` would only look for transforms again.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del ctx, inputs, output


def _only_once(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(
            f"{name}: the Triton kernel can be differentiated only once, and the derivative of a "
            "gradient was asked for; use('reference') gives all orders"
        )

    return refuse


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _kind(parameter: inspect.Parameter) -> str:
    if parameter.annotation in {Tensor, Tensor | None}:
        return "tensor"
    return "list" if parameter.annotation == list[Tensor] else "value"
