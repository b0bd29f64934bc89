"""Launches kernels on a GPU that is not there: nothing is compiled or run, only looked up.

Run by tests, without the interpreter; prints nothing if all is as it should be.
"""

import logging
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bevatron.kernels.shared import triton_launch
from bevatron.kernels.shared.triton_compile import rehearse
from bevatron.kernels.shared.triton_launch import Launch, launch

TARGET = GPUTarget("cuda", 90, 32)
looked_up, ran, said = [], [], []


@triton.jit(do_not_specialize=["count"])
def count_kernel(X, Y, count, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < count) * factor, mask=i < count)


@triton.jit
def scale_kernel(X, Y, n, factor, BLOCK: tl.constexpr, SQUARED: tl.constexpr = False):
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n).to(tl.float32)  # [BLOCK]
    if SQUARED:
        x = x * x
    tl.store(Y + i, x * factor, mask=i < n)


class Compiled:
    """What Triton keeps of a variant of a kernel."""

    function, packed_metadata = 7, (4, 1, 0)
    metadata = SimpleNamespace(target=TARGET)

    def __init__(self, signature, attrs):
        self.variant = signature, attrs

    def run(self, *arguments):
        ran.append((self, arguments))

    def launch_metadata(self, *arguments):
        return arguments


def without_compiler(kernel, key, signature, device, constexprs, options, attrs, warmup):
    made = Compiled(signature, attrs)
    kernel.device_caches[device][0][key] = made
    return made


def triton_run(kernel, *args, **kwargs):
    looked_up.append(kernel)
    return run(kernel, *args, **kwargs)


def install():
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: TARGET,
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 99,
        )
    )
    JITFunction._do_compile = without_compiler
    JITFunction.run = triton_launch._triton_run = triton_run
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bevatron.kernels").addHandler(handler)


def variants():
    """Tensors and numbers of which Triton makes several variants of one kernel."""
    memory = torch.zeros(64)
    half = torch.zeros(64, dtype=torch.float16)
    for x, y in [
        (memory, memory),
        (memory[1:], memory),
        (memory, memory[1:]),
        (memory[4:], memory),
        (half, memory),
        (memory, half),
        (half[1:], memory),
        (half[8:], memory),
    ]:
        for n in (16, 1, 17, 2**31):
            yield x, y, n


def each_launch_takes_the_variant_that_triton_would_take():
    for _ in range(2):
        for x, y, n in variants():
            launch(scale_kernel, (2,), (x, y), (n, 0.5), BLOCK=16, num_warps=2)
            taken = ran[-1][0]
            wanted = scale_kernel[(2,)](x, y, n, 0.5, BLOCK=16, num_warps=2)
            assert taken is wanted, (x.dtype, x.data_ptr() % 16, y.data_ptr() % 16, n)
    assert len({id(compiled) for compiled, _ in ran}) > 8


def triton_is_asked_once():
    x, one = torch.zeros(64), Launch(scale_kernel, (3, 2), (48, 2.0), BLOCK=32)
    for tensors in ((x, x), (x[1:], x), (x, x)):
        one(*tensors)
        before = len(looked_up)
        one(*tensors)
        assert len(looked_up) == before
        # grid, stream, function, its metadata; no metadata of the launch, no hooks; arguments
        addresses = [tensor.data_ptr() for tensor in tensors]
        wanted = (3, 2, 1, 99, 7, (4, 1, 0), None, None, None, *addresses, 48, 2.0, 32, False)
        assert ran[-1][1] == wanted, ran[-1][1]
    before = len(looked_up), len(ran)
    Launch(scale_kernel, (0,), (48, 2.0), BLOCK=32)(x, x)
    assert (len(looked_up), len(ran)) == before


def another_number_of_rows_is_no_other_launch():
    x = torch.zeros(64)
    kept = len(triton_launch._prepared)
    for count in (48, 17, 1, 48):
        launch(count_kernel, (count, 2), (x, x), (count, 2.0), BLOCK=32)
        assert ran[-1][1][:3] == (count, 2, 1)
        assert ran[-1][1][-3:-1] == (count, 2.0)
    before = len(ran)
    launch(count_kernel, (0, 2), (x, x), (0, 2.0), BLOCK=32)
    assert len(ran) == before
    assert len(triton_launch._prepared) == kept + 1
    launch(count_kernel, (2,), (x, x), (2**31, 2.0), BLOCK=32)  # another type of integer
    launch(count_kernel, (2,), (x, x), (48, 3.0), BLOCK=32)
    assert len(triton_launch._prepared) == kept + 3
    launch(count_kernel, (2,), (x, x), (48, 3.0), BLOCK=16)
    assert ran[-1][1][-1] == 16


def kept_launches_are_bounded():
    x, most = torch.zeros(64), triton_launch.MOST_PREPARED
    triton_launch.MOST_PREPARED = 2
    for factor in (4.0, 5.0, 6.0, 4.0):
        launch(count_kernel, (2,), (x, x), (48, factor), BLOCK=32)
        assert ran[-1][1][-2] == factor
        assert len(triton_launch._prepared) <= 2
    triton_launch.MOST_PREPARED = most


def kernels_of_amd_are_left_to_triton():
    Compiled.metadata = SimpleNamespace(target=GPUTarget("hip", "gfx942", 64))
    x, one = torch.zeros(64), Launch(scale_kernel, (1,), (5, 2.0), BLOCK=32)
    before = len(looked_up)
    for count in (1, 2):
        one(x, x)
        assert len(looked_up) == before + count
    Compiled.metadata = SimpleNamespace(target=TARGET)


def a_rehearsal_launches_nothing():
    x, one = torch.zeros(64), Launch(scale_kernel, (1,), (4, 2.0), BLOCK=32, SQUARED=True)
    one(x, x)
    before = len(ran)
    rehearse(lambda: one(x, x))
    assert len(ran) == before
    one(x, x)
    assert len(ran) == before + 1


def a_profiler_sees_every_launch():
    x, one = torch.zeros(64), Launch(scale_kernel, (1,), (4, 2.0), BLOCK=32)
    one(x, x)
    hook = triton.knobs.runtime.launch_enter_hook

    def note(*_):
        pass

    hook.add(note)
    one(x, x)
    assert ran[-1][1][7] is hook
    hook.remove(note)
    one(x, x)
    assert ran[-1][1][7] is None


def another_triton_is_left_to_itself():
    def refuse(compiled, *arguments):
        if arguments[6] is None:  # what a direct launch passes
            raise TypeError("takes 8 arguments")
        ran.append((compiled, arguments))

    Compiled.run = refuse
    x = torch.zeros(64)
    for factor in (2.0, 3.0):
        one = Launch(scale_kernel, (1,), (4, factor), BLOCK=32)
        for count in range(3):
            before = len(ran)
            one(x, x)
            assert len(ran) == before + 1, count
    assert len(said) == 1, said
    assert "takes 8 arguments" in said[0]


if __name__ == "__main__":
    run = JITFunction.run
    install()
    each_launch_takes_the_variant_that_triton_would_take()
    triton_is_asked_once()
    another_number_of_rows_is_no_other_launch()
    kept_launches_are_bounded()
    kernels_of_amd_are_left_to_triton()
    a_rehearsal_launches_nothing()
    a_profiler_sees_every_launch()
    another_triton_is_left_to_itself()  # last: from then on nothing is prepared
