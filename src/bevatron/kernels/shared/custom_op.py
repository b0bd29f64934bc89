"""One declaration of a custom operator: its schema, its results for tracing and its gradients.

A Triton launch is hidden from torch behind a custom operator. Such an operator is declared once::

    @custom_op("scale", fake="x")
    def forward(x: Tensor, factor: Tensor) -> Tensor: ...

    @custom_op("scale_backward", fake="x factor")
    def backward(dy: Tensor, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]: ...

    forward.gradients("x factor", backward)

Results are told by the arguments they look like, and a gradient's formula takes what it needs from
the forward pass by the names of its own parameters; nothing is listed twice.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

PLAIN_TENSORS = {Tensor, torch.nn.Parameter}
"""Types of which nobody watches the operations."""
NEEDS = "needs"
"""Parameter of a formula that receives whether each gradient is needed."""


def custom_op(
    name: str, *, fake: str | Callable[..., Any], outputs: str = ""
) -> Callable[[Callable[..., Any]], "CustomOp"]:
    """Declare the operator ``torch.ops.bevatron.NAME``; its schema is the function's signature.

    Parameters
    ----------
    name
        Its name, without the namespace.
    fake
        What the results look like: names of the arguments that have their shapes and types (one
        that is None has a result without elements), or a function that allocates them and takes
        arguments of the operator by name.
    outputs
        Names of the results, if a gradient's formula takes some of them.

    Examples
    --------
    >>> @custom_op("doctest_twice", fake="x")
    ... def twice(x: Tensor) -> Tensor:
    ...     return 2 * x
    >>> twice.gradients("x", lambda dy: 2 * dy)
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(twice(x).sum(), x)
    (tensor([2., 2.]),)
    """
    return lambda function: CustomOp(name, function, fake, outputs.split())


class CustomOp:
    """A custom operator, called like its function; made by `custom_op`.

    The dispatcher is asked only where something watches it (a compiler, a mode, a subclass of
    tensors): a call through it and its backward pass take a few hundred microseconds of host time
    for an operator of many arguments.

    Attributes
    ----------
    op
        The operator as torch knows it.
    parameters, outputs
        Names of arguments and results.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fake: str | Callable[..., Any],
        outputs: Sequence[str],
    ) -> None:
        self.op = torch.library.custom_op(f"bevatron::{name}", function, mutates_args=())
        self.__name__, self.__doc__, self.__module__ = name, function.__doc__, function.__module__
        self.signature = inspect.signature(function)
        self.parameters, self.outputs = list(self.signature.parameters), list(outputs)
        self.op.register_fake(_fake(self.parameters, fake))
        self._function = function
        self._apply = _function_class(name, function, _keep_nothing, _only_once(name)).apply

    def __call__(self, *arguments: Any) -> Any:
        """Compute the results, which autograd records if an argument requires gradients."""
        if torch.compiler.is_compiling():
            return self.op(*arguments)
        requires_grad = False
        for argument in arguments:
            if isinstance(argument, Tensor):
                if type(argument) not in PLAIN_TENSORS:
                    return self.op(*arguments)
                requires_grad = requires_grad or argument.requires_grad
        # There is no public way to ask for either.
        transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001
        if transformed or torch._C._len_torch_dispatch_stack() > 0:  # noqa: SLF001
            return self.op(*arguments)
        if requires_grad and torch.is_grad_enabled():
            return self._apply(*arguments)
        return self._function(*arguments)

    def gradients(self, of: str, formula: "Callable[..., Any] | CustomOp") -> None:
        """Register how gradients are computed.

        Parameters
        ----------
        of
            Names of the arguments that the formula gives gradients of; others have none.
        formula
            Returns these gradients in that order (a single one not in a tuple), or None for all.
            What it returns for an argument that was None is dropped. Its parameters are taken by
            name: first gradients of the results, in their order, under any names; arguments and
            results of the operator, which are saved for it; ``needs``, a list that says which of
            the gradients the running backward pass uses (the others are dropped).
        """
        wiring = _Wiring(self, of.split(), formula)
        self.op.register_autograd(wiring.backward, setup_context=wiring.save)
        kind = _function_class(self.__name__, self._function, wiring.save, wiring.backward)
        self._apply = kind.apply


def is_needed(ctx: Any, position: int, tensor: int | None = None) -> bool:
    """Whether the running backward pass needs the gradient of an argument of an operator.

    ``ctx.needs_input_grad`` says only that the argument requires gradients. The forces of a
    potential are gradients with respect to positions alone; then those of weights, which also
    require gradients, would be computed and thrown away.

    Parameters
    ----------
    ctx
        Of the backward pass.
    position
        Place of the argument among all arguments.
    tensor
        Place among those that are tensors; ``position`` if not given.
    """
    if not ctx.needs_input_grad[position]:
        return False
    if torch.compiler.is_compiling():
        return True
    node = ctx.next_functions[position if tensor is None else tensor][0]
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001
    except (AttributeError, RuntimeError):
        # A leaf, of which the engine does not tell, or a torch that does not offer this.
        return True


class _Wiring:
    """What a formula takes from the forward pass, and where its results go."""

    def __init__(self, op: CustomOp, of: list[str], formula: Callable[..., Any]) -> None:
        given = {name: place for place, name in enumerate(op.parameters)}
        kinds = [_kind(parameter) for parameter in op.signature.parameters.values()]
        results = {name: place for place, name in enumerate(op.outputs)}
        wanted = formula.parameters if isinstance(formula, CustomOp) else _parameters(formula)
        known = [name for name in wanted if name in given or name in results or name == NEEDS]
        self._num_gradients = len(wanted) - len(known)
        unknown = set(of) - set(given) | set(wanted[self._num_gradients :]) - set(known)
        if unknown:
            raise TypeError(
                f"{op.__name__}: gradients know no {', '.join(sorted(unknown))} (arguments: "
                f"{', '.join(given)}; results: {', '.join(results)})"
            )
        self._formula, self._of = formula, [given[name] for name in of]
        self._lists = [place for place, kind in enumerate(kinds) if kind == "list"]
        self._asks = NEEDS in wanted
        # Where each parameter after the gradients comes from: a kind, and a place in that kind.
        self._inputs = [given[n] for n in known if n in given and n != NEEDS]
        self._tensors = [place for place in self._inputs if kinds[place] == "tensor"]
        self._saved_lists = [place for place in self._inputs if kinds[place] == "list"]
        self._values = [place for place in self._inputs if kinds[place] == "value"]
        self._results = [results[n] for n in known if n not in given and n in results]
        self._sources: list[tuple[str, int]] = []
        for name in known:
            if name == NEEDS:
                self._sources.append((NEEDS, 0))
            elif name in given:
                kind = kinds[given[name]]
                places = {
                    "tensor": self._tensors,
                    "list": self._saved_lists,
                    "value": self._values,
                }[kind]
                self._sources.append((kind, places.index(given[name])))
            else:
                place = len(self._tensors) + self._results.index(results[name])
                self._sources.append(("tensor", place))

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the formula takes."""
        several = isinstance(output, tuple)
        kept = [inputs[place] for place in self._tensors]
        kept += [output[place] if several else output for place in self._results]
        for place in self._saved_lists:
            kept += inputs[place]
        ctx.save_for_backward(*kept)
        ctx.values = [inputs[place] for place in self._values]
        ctx.lengths = [len(inputs[place]) for place in self._saved_lists]
        ctx.of_lists = [(place, len(inputs[place])) for place in self._lists]
        ctx.count = len(inputs)
        ctx.is_given = [inputs[place] is not None for place in self._of]
        if self._asks:
            ctx.tensors = [
                sum(isinstance(each, Tensor) for each in inputs[:place]) for place in self._of
            ]
        ctx.set_materialize_grads(False)
        if several and len(output) > self._num_gradients:
            ctx.mark_non_differentiable(*output[self._num_gradients :])

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Call the formula and put its gradients in the places of their arguments."""
        placed: list[Any] = [None] * ctx.count
        for place, length in ctx.of_lists:
            placed[place] = [None] * length
        grads = grads[: self._num_gradients]
        needs = ctx.is_given
        if self._asks:
            needs = [
                is_given and is_needed(ctx, place, tensor)
                for is_given, place, tensor in zip(ctx.is_given, self._of, ctx.tensors, strict=True)
            ]
        if all(grad is None for grad in grads) or not any(needs):
            return tuple(placed)
        found = self._formula(*grads, *self._take(ctx, needs))
        if found is not None:
            each = found if isinstance(found, tuple) else (found,)
            for place, gradient, is_needed_ in zip(self._of, each, needs, strict=True):
                placed[place] = gradient if is_needed_ else None
        return tuple(placed)

    def _take(self, ctx: Any, needs: list[bool]) -> list[Any]:
        # Once: a recomputed tensor is handed out once.
        saved = ctx.saved_tensors
        lists, first = [], len(self._tensors) + len(self._results)
        for length in ctx.lengths:
            lists.append(list(saved[first : first + length]))
            first += length
        sources = {"tensor": saved, "list": lists, "value": ctx.values, NEEDS: [needs]}
        return [sources[kind][place] for kind, place in self._sources]


def _fake(parameters: list[str], fake: str | Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of all arguments that allocates results."""
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


def _function_class(
    name: str,
    function: Callable[..., Any],
    save: Callable[..., None],
    formula: Callable[..., Any],
) -> type[torch.autograd.Function]:
    """Make the function that autograd records where the dispatcher is not asked."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        outputs = function(*inputs)
        save(ctx, inputs, outputs)
        return outputs

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = formula(ctx, *grads)
        return tuple(None if isinstance(each, list) else each for each in found)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"bevatron::{name}", (torch.autograd.Function,), methods)


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
