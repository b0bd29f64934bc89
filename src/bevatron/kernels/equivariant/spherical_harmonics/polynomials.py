"""Spherical harmonics as polynomials, and the Triton source of kernels that evaluate them.

A generated kernel owns ``BLOCK`` edges, one per lane: every variable is a [BLOCK] vector in
registers, and all monomials and coefficients are unrolled. It reads the vectors (and gradients)
component by component and writes the components of the result, without shared memory.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from bevatron.maths.constants import computed_once
from bevatron.maths.so3 import spherical_harmonics

Monomial = tuple[int, int, int]
"""Powers of x, y and z."""

AXES = "xyz"


@computed_once
def polynomials(l_max: int) -> tuple[dict[Monomial, float], ...]:
    """Return every component as coefficients of the monomials of its own degree.

    The coefficients are fitted to the harmonics at random points; with more points than
    coefficients the fit of a polynomial is exact.

    Examples
    --------
    >>> [round(c, 4) for c in polynomials(1)[2].values()]
    [1.7321]
    """
    points = np.random.default_rng(0).normal(size=(64, 3))
    values = spherical_harmonics(l_max, torch.from_numpy(points), normalize=False).numpy()
    found = []
    for degree in range(l_max + 1):
        powers = [p for p in monomials(degree) if sum(p) == degree]
        table = np.stack([np.prod(points**p, axis=1) for p in powers], axis=1)
        part = values[:, degree**2 : (degree + 1) ** 2]
        solved = np.linalg.lstsq(table, part, rcond=None)[0]
        solved[np.abs(solved) < 1e-10] = 0.0
        found += [
            {p: float(c) for p, c in zip(powers, column, strict=True) if c} for column in solved.T
        ]
    return tuple(found)


def monomials(degree: int) -> list[Monomial]:
    """List all monomials up to a degree, in order of degree."""
    powers = [
        (a, b, c)
        for a in range(degree + 1)
        for b in range(degree + 1 - a)
        for c in range(degree + 1 - a - b)
    ]
    return sorted(powers, key=sum)


def derivative(monomial: Monomial, *axes: int) -> tuple[int, Monomial] | None:
    """Differentiate a monomial; return factor and monomial, or None for zero."""
    factor, powers = 1, list(monomial)
    for axis in axes:
        factor *= powers[axis]
        powers[axis] -= 1
    return (factor, (powers[0], powers[1], powers[2])) if factor else None


def write_source(l_max: int, kind: str) -> str:
    """Write the kernel ``forward``, ``backward`` or ``double_backward``; one edge per lane."""
    arguments = {
        "forward": "v_ptr, y_ptr",
        "backward": "g_ptr, v_ptr, by_v_ptr",
        "double_backward": "w_ptr, g_ptr, v_ptr, by_g_ptr, by_v_ptr",
    }[kind]
    size = (l_max + 1) ** 2
    lines = [
        f"def harmonics_{kind}({arguments}, count, BLOCK: tl.constexpr, WIDE: tl.constexpr):",
        "T: tl.constexpr = tl.float64 if WIDE else tl.float32",
        "e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "mask = e < count",
        *(
            f"v{axis} = tl.load(v_ptr + 3 * e + {i}, mask=mask, other=1.0).to(T)  # [BLOCK]"
            for i, axis in enumerate(AXES)
        ),
        "inverse = 1.0 / tl.sqrt(vx * vx + vy * vy + vz * vz)",
        *(f"{axis} = v{axis} * inverse" for axis in AXES),
        *_powers(l_max),
    ]
    if kind == "forward":
        for i, polynomial in enumerate(polynomials(l_max)):
            terms = [(c, _name(p)) for p, c in polynomial.items()]
            value = _sum(terms) if i else "tl.full((BLOCK,), 1.0, T)"
            lines.append(f"tl.store(y_ptr + {size} * e + {i}, {value}, mask=mask)")
    else:
        lines += _gradient_source(l_max)
    if kind == "backward":
        lines.append("b = x * px + y * py + z * pz")
        lines += [
            f"tl.store(by_v_ptr + 3 * e + {i}, (p{a} - b * {a}) * inverse, mask=mask)"
            for i, a in enumerate(AXES)
        ]
    if kind == "double_backward":
        lines += _second_source(l_max)
    return "\n    ".join(["@jit(do_not_specialize=['count'])\n" + lines[0], *lines[1:]]) + "\n"


def _gradient_source(l_max: int) -> list[str]:
    """Write L = sum g Y as coefficients k_abc of monomials, and its gradient p by x, y and z."""
    size = (l_max + 1) ** 2
    lines = [
        f"g{i} = tl.load(g_ptr + {size} * e + {i}, mask=mask, other=0.0).to(T)  # [BLOCK]"
        for i in range(1, size)
    ]
    for monomial in monomials(l_max)[1:]:
        terms = [
            (polynomial[monomial], f"g{i}")
            for i, polynomial in enumerate(polynomials(l_max))
            if monomial in polynomial
        ]
        lines.append(f"k{_name(monomial)} = {_sum(terms)}")
    return lines + [f"p{a} = {_derived(l_max, i)}" for i, a in enumerate(AXES)]


def _second_source(l_max: int) -> list[str]:
    r"""Gradients of :math:`\phi = w \cdot (p - (u \cdot p) u) / r` by g and v, with u = v / r.

    With respect to g: the derivative of each harmonic along :math:`t / r`, where
    :math:`t = w - (w \cdot u) u`. With respect to u, with the Hessian H of L:
    :math:`(H t - (u \cdot p) w - (w \cdot u) p) / r`, of which the component along u drops out
    because u has unit length; the dependence on r adds :math:`-\phi u / r`.
    """
    size = (l_max + 1) ** 2
    lines = [
        *(
            f"w{axis} = tl.load(w_ptr + 3 * e + {i}, mask=mask, other=0.0).to(T)  # [BLOCK]"
            for i, axis in enumerate(AXES)
        ),
        "a = wx * x + wy * y + wz * z",
        "b = x * px + y * py + z * pz",
        *(f"t{axis} = w{axis} - a * {axis}" for axis in AXES),
    ]
    for monomial in monomials(l_max)[1:]:
        along = [
            (float(found[0]), f"t{AXES[i]} * {_name(found[1])}")
            for i in range(3)
            if (found := derivative(monomial, i))
        ]
        lines.append(f"d{_name(monomial)} = inverse * ({_sum(along)})")
    lines.append(f"tl.store(by_g_ptr + {size} * e, tl.zeros((BLOCK,), T), mask=mask)")
    for i, polynomial in list(enumerate(polynomials(l_max)))[1:]:
        value = _sum((c, f"d{_name(p)}") for p, c in polynomial.items())
        lines.append(f"tl.store(by_g_ptr + {size} * e + {i}, {value}, mask=mask)")
    for i, a in enumerate(AXES):
        hessian = " + ".join(f"t{AXES[j]} * ({_derived(l_max, i, j)})" for j in range(3))
        lines.append(f"u{a} = ({hessian} - b * w{a} - a * p{a}) * inverse")
    lines += [
        "phi = (wx * px + wy * py + wz * pz - a * b) * inverse",
        "c = ux * x + uy * y + uz * z + phi",
    ]
    return lines + [
        f"tl.store(by_v_ptr + 3 * e + {i}, (u{a} - c * {a}) * inverse, mask=mask)"
        for i, a in enumerate(AXES)
    ]


def _derived(l_max: int, *axes: int) -> str:
    """Write the derivative of L in some of x, y and z, given by coefficients k of monomials."""
    terms = []
    for monomial in monomials(l_max)[1:]:
        found = derivative(monomial, *axes)
        if found:
            factor, rest = found
            product = f"k{_name(monomial)}"
            terms.append(
                (float(factor), product if not sum(rest) else f"{product} * {_name(rest)}")
            )
    return _sum(terms)


def _powers(l_max: int) -> Iterator[str]:
    """Write every monomial as a coordinate times a monomial of one degree less."""
    yield "m000 = tl.full((BLOCK,), 1.0, T)"
    for monomial in monomials(l_max)[1:]:
        axis = next(i for i in range(3) if monomial[i])
        lower = tuple(p - (i == axis) for i, p in enumerate(monomial))
        rest = "" if not sum(lower) else " * " + _name(lower)
        yield f"{_name(monomial)} = {AXES[axis]}{rest}"


def _name(monomial: Iterable[int]) -> str:
    return "m" + "".join(map(str, monomial))


def _sum(terms: Iterable[tuple[float, str]]) -> str:
    """Write a sum of products."""
    written = [name if c == 1.0 else f"{c!r} * {name}" for c, name in terms]
    return " + ".join(written) or "tl.zeros((BLOCK,), T)"
