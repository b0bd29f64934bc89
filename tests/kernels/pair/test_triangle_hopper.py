"""The triangle multiplication's kernels for Hopper, and which pairs and GPUs take them."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from pair_operators import DEVICE, GPU
from triangle_pairs import BIASES, OthersRows, check, dropped, make

from bevatron.kernels import explain, triangle_multiply, use
from bevatron.kernels.pair.triangle_multiply.tiles import replaced
from bevatron.testing import assert_close
from half_precision import check_no_worse

pytest.importorskip("triton", reason="the kernels need the package triton")

ON_HOPPER = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)


@pytest.fixture
def hopper(monkeypatch):
    """Let the kernels for Hopper take small pairs too; they must have taken every one."""
    from bevatron.kernels.pair.triangle_multiply import triton_launch

    taken, on_hopper = [], triton_launch.on_hopper
    monkeypatch.setattr(triton_launch, "FEWEST_TILES", 1)
    monkeypatch.setattr(
        triton_launch, "on_hopper", lambda *given: taken.append(on_hopper(*given)) or taken[-1]
    )
    with replaced():
        yield
    assert taken
    assert all(taken)


@ON_HOPPER
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize(
    ("length", "biases", "batch", "masked", "dtype"),
    [
        (8, (), (), False, torch.bfloat16),  # one tile
        (24, BIASES, (2,), True, torch.bfloat16),
        (40, BIASES[3:], (), True, torch.float16),
        (264, (), (), True, torch.bfloat16),  # several tiles for every warp group
    ],
)
def test_on_hopper_result_and_gradients_are_right(
    length, biases, batch, masked, dtype, outgoing, hopper
):
    check(make(length, 128, 128, biases, batch, masked, dtype) | {"outgoing": outgoing})


@ON_HOPPER
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_on_hopper_a_dropped_update_is_right(residual, batch, hopper):
    inputs = make(24, 128, 128, BIASES, batch, dtype=torch.bfloat16)
    mask = dropped(inputs["z"])

    def run(z, **others):
        return triangle_multiply(z, drop=mask.to(z.dtype), residual=residual, **others)

    check(inputs, run)


@ON_HOPPER
@pytest.mark.parametrize("outgoing", [True, False])
def test_on_hopper_sixteen_bits_are_no_worse_than_the_reference(outgoing, hopper):
    inputs = make(64, 128, 128, BIASES, dtype=torch.bfloat16)
    mask = inputs.pop("mask")
    check_no_worse(
        "triangle_multiply", partial(triangle_multiply, mask=mask, outgoing=outgoing), inputs
    )


def both_passes(inputs, along=None, **how):
    """The result and all gradients, along ``along`` or a slope over all elements."""
    leaves = {
        n: v.detach().requires_grad_() for n, v in inputs.items() if n not in ("mask", "drop")
    }
    others = {n: inputs[n] for n in ("mask", "drop") if n in inputs}
    y = triangle_multiply(**leaves, **others, **how)
    if along is None:
        along = torch.linspace(-1.0, 1.0, y.numel(), device=y.device).to(y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [*leaves.values()], along)]


@ON_HOPPER
def test_on_hopper_two_runs_have_the_same_bits(hopper):
    inputs = make(264, 128, 128, dtype=torch.bfloat16)
    first = both_passes(inputs)
    for _ in range(20):
        assert all(map(torch.equal, first, both_passes(inputs)))
    with torch.no_grad():
        assert torch.equal(triangle_multiply(**inputs), first[0])


@ON_HOPPER
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_on_hopper_rows_of_a_sharded_pair_are_no_worse_than_the_reference(batch, outgoing, hopper):
    inputs = make(64, 128, 128, BIASES, batch or (1,), dtype=torch.bfloat16)
    rows = slice(3, 43)
    z, mask = inputs["z"][:, rows].clone(), inputs.pop("mask")[:, rows]
    inputs["z"], mask = (z, mask) if batch else (z[0], mask[0])
    drop = dropped(inputs["z"])

    def run(z, **others):
        how = {"outgoing": outgoing, "residual": True, "contraction": OthersRows(24, rows.start)}
        return triangle_multiply(z, mask=mask, drop=drop.to(z.dtype), **others, **how)

    check_no_worse("triangle_multiply", run, inputs)


@ON_HOPPER
def test_on_hopper_tensors_that_are_not_aligned_give_the_same_bits(hopper):
    inputs = make(24, 128, 128, BIASES, dtype=torch.bfloat16)
    inputs["drop"] = dropped(inputs["z"])
    along = torch.randn_like(inputs["z"])

    def shifted(x):
        memory = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)
        return memory[1:].copy_(x.flatten()).view(x.shape)

    with use(triangle_multiply="triton"):
        wanted = both_passes(inputs, along, residual=True)
        moved = {name: shifted(value) for name, value in inputs.items()}
        found = both_passes(moved, shifted(along), residual=True)
    assert moved["z"].data_ptr() % 16
    assert all(map(torch.equal, found, wanted))


@ON_HOPPER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_hopper_masks_of_every_type_give_the_same_bits(dtype, hopper):
    inputs = make(24, 128, 128, dtype=torch.bfloat16)
    with use(triangle_multiply="triton"):
        wanted = both_passes(inputs)
        found = both_passes(inputs | {"mask": inputs["mask"].to(dtype)})
    assert all(map(torch.equal, found, wanted))


@ON_HOPPER
def test_on_hopper_float32_weights_have_float32_gradients(hopper):
    inputs = make(24, 128, 128, BIASES)
    exact = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
    with use(triangle_multiply="triton"):
        found = both_passes(inputs | {"z": inputs["z"].to(torch.bfloat16)})
    with use(triangle_multiply="reference"):
        wanted = both_passes(exact)
    assert {g.dtype for g in found[2:]} == {torch.float32}
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, 2e-2)


@ON_HOPPER
def test_on_hopper_gradients_beyond_2_to_the_31_elements_are_right(hopper):
    """2,304 tokens: the gradients of a, b and their gates are 2.7 G elements, 5.4 GB."""
    length = 2304
    inputs = make(8, 128, 128, dtype=torch.bfloat16)
    inputs["z"] = torch.randn(length, length, 128, device=DEVICE, dtype=torch.bfloat16)
    inputs["mask"] = torch.zeros(length, length, device=DEVICE, dtype=torch.bool)
    inputs["mask"][-16:, -16:] = True
    along = torch.zeros_like(inputs["z"])
    along[-16:, -16:] = torch.randn(16, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    corner = inputs | {name: inputs[name][-16:, -16:].contiguous() for name in ("z", "mask")}
    with use(triangle_multiply="triton"):
        y, dz, *weights = both_passes(inputs, along)
        wanted = both_passes(corner, along[-16:, -16:].contiguous())
    for got, want in zip((y[-16:, -16:], dz[-16:, -16:], *weights), wanted, strict=True):
        assert_close(got, want, 2e-2)


def test_the_registry_says_where_kernels_for_hopper_run(monkeypatch):
    from bevatron.kernels.pair.triangle_multiply import triton_launch

    said = "triangle_multiply: triton (requested; kernels for Hopper take long pairs of 128"
    for is_hopper in (True, False):
        monkeypatch.setattr(triton_launch, "is_hopper", lambda _, is_one=is_hopper: is_one)
        with use("triton"):
            assert (
                explain("triangle_multiply", DEVICE, torch.bfloat16).startswith(said) == is_hopper
            )
            assert "Hopper" not in explain("triangle_multiply", DEVICE, torch.float32)
    with use("reference"):
        assert "Hopper" not in explain("triangle_multiply", DEVICE, torch.bfloat16)


def of_hopper(z, hidden, monkeypatch):
    """The passes for which a pair would take the kernels for Hopper, if its GPU were one."""
    from bevatron.kernels.pair.triangle_multiply import triton_launch

    monkeypatch.setattr(triton_launch, "is_hopper", lambda _: True)
    pair = triton_launch.Pair.of(z, torch.ones(hidden))
    return set(triton_launch.on_hopper(pair, 1e-5, None, None, None, None, False))


@pytest.mark.parametrize(
    ("shape", "hidden", "dtype", "taken"),
    [
        ((256, 256, 128), 128, torch.bfloat16, True),
        ((2, 184, 184, 128), 128, torch.float16, True),
        ((32, 2048, 128), 128, torch.bfloat16, True),  # rows of a sharded pair
        ((248, 248, 128), 128, torch.bfloat16, False),  # too short
        ((32768, 32768, 128), 128, torch.bfloat16, False),  # too long
        ((260, 260, 128), 128, torch.bfloat16, False),  # lines are padded
        ((33, 2008, 128), 128, torch.bfloat16, False),  # not a multiple of 64 edges
        ((256, 256, 64), 128, torch.bfloat16, False),
        ((256, 256, 128), 64, torch.bfloat16, False),
        ((256, 256, 128), 128, torch.float32, False),
    ],
)
def test_the_kernels_of_hopper_take_the_pairs_they_are_for(
    shape, hidden, dtype, taken, monkeypatch
):
    z = torch.empty(shape, device="meta", dtype=dtype)
    passes = {"project", "output", "project_input"} if taken else set()
    assert of_hopper(z, hidden, monkeypatch) == passes


def test_the_kernels_of_hopper_take_no_pair_with_gaps(monkeypatch):
    z = torch.empty(256, 512, 256, device="meta", dtype=torch.bfloat16)
    lines, channels = z.view(256, 1024, 128)[:, :256], z[:, :, :128]
    turned = z.view(512, 512, 128).transpose(0, 1)
    for part in (lines, channels, turned):
        assert not of_hopper(part, 128, monkeypatch)
    assert of_hopper(turned.contiguous(), 128, monkeypatch)


@pytest.mark.parametrize(
    ("capability", "version", "interpret", "fits"),
    [
        ((9, 0), "3.6.0", False, True),
        ((9, 0), "3.7.1", False, True),
        ((9, 0), "3.7.1", True, False),
        ((9, 0), "3.8.0", False, True),
        ((9, 0), "3.9.0", False, False),
        ((8, 0), "3.6.0", False, False),
        ((10, 0), "3.6.0", False, False),
    ],
)
def test_the_kernels_of_hopper_run_there_with_known_compilers(
    capability, version, interpret, fits, monkeypatch
):
    from bevatron.kernels.pair.triangle_multiply import triton_launch

    compiler = Mock(__version__=version)
    compiler.knobs.runtime.interpret = interpret
    monkeypatch.setattr(triton_launch, "triton", compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    is_hopper = triton_launch.is_hopper.__wrapped__
    assert is_hopper(torch.device("cuda", 0)) == fits
    assert not is_hopper(torch.device("cpu"))


def test_a_gpu_that_is_only_planned_for_is_asked_nothing(monkeypatch):
    """A dry run on a computer without GPU names the implementations, which asks for Hopper's."""
    from bevatron.kernels.pair.triangle_multiply import triton_launch

    compiler = Mock(__version__="3.7.1")
    compiler.knobs.runtime.interpret = False
    monkeypatch.setattr(triton_launch, "triton", compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(side_effect=AssertionError))
    assert not triton_launch.is_hopper.__wrapped__(torch.device("cuda"))


def test_the_kernels_of_hopper_compile():
    """On any machine, as launches ask for them: Gluon's interface changes with Triton."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "compiled_hopper.py")],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    passes = {"hopper_project_kernel 12", "hopper_output_kernel 12"}
    assert set(done.stdout.splitlines()) == passes | {"hopper_project_input_kernel 8"}
