"""Made-up timelines give the shares, classes and gains that one reads off them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevatron.train.profiling import timeline as profile
from bevatron.train.profiling.autograd_memory import saved_bytes_by_module
from bevatron.train.profiling.timeline import Span, Total

spans = st.lists(
    st.builds(
        Span,
        st.sampled_from(["gemm", "nccl", "Memcpy DtoD", "_adam"]),
        st.integers(0, 60),
        st.integers(0, 20),
        st.integers(0, 2),
    ),
    max_size=12,
)


def moments(chosen, window=(0, 90)):
    """Every nanosecond during which any of some spans runs."""
    found = {t for span in chosen for t in range(span.start, span.end)}
    return {t for t in found if window[0] <= t < window[1]}


@given(spans)
def test_a_union_covers_each_moment_once(chosen):
    found = profile.union(chosen)
    assert profile.length(found) == len(moments(chosen))
    assert all(a[1] < b[0] for a, b in pairwise(found))


@given(spans, spans)
def test_intersections_and_gaps_are_those_of_sets_of_moments(first, second):
    a, b = profile.union(first), profile.union(second)
    both = profile.intersection(a, b)
    assert profile.length(both) == len(moments(first) & moments(second))
    left = profile.gaps(a, (10, 50))
    assert profile.length(left) == 40 - len(moments(first, (10, 50)))
    assert not profile.intersection(left, a)


@given(spans)
def test_the_four_parts_of_a_window_are_told_apart_and_add_up(chosen):
    window = (5, 70)
    found = profile.occupation(chosen, window)
    sent = moments([s for s in chosen if s.name == "nccl"], window)
    computed = moments([s for s in chosen if s.name != "nccl"], window)
    assert found.computing == len(computed - sent)
    assert found.communicating == len(sent - computed)
    assert found.overlapped == len(sent & computed)
    assert found.idle == 65 - len(sent | computed)
    assert sum(found.shares().values()) == pytest.approx(1.0)


@given(spans)
def test_innermost_pieces_cover_the_same_moments_and_never_overlap(chosen):
    for stream in range(3):
        own = [span for span in chosen if span.stream == stream]
        pieces = [s for s in profile.innermost(chosen) if s.stream == stream]
        assert moments(pieces) == moments(own)
        assert sum(piece.duration for piece in pieces) == len(moments(own))


def test_an_operator_has_the_time_that_those_it_calls_leave():
    calls = [Span("linear", 0, 10), Span("t", 1, 2), Span("addmm", 4, 5), Span("copy", 6, 1)]
    found = profile.by_name(profile.innermost(calls), calls)
    assert found == {
        "addmm": Total(4, 1),
        "linear": Total(3, 1),
        "t": Total(2, 1),
        "copy": Total(1, 1),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5>(P)", "matrix product"),
        ("nvjet_sm90_sss_128x128_32x3_TNN", "matrix product"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8", "matrix product"),
        ("aten::addmm", "matrix product"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>(int)", "memory-bound"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float> >(ReduceOp)", "memory-bound"),
        ("triton_poi_fused_add_mul_0", "memory-bound"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>(int)", "copy"),
        ("Memset (Device)", "copy"),
        ("aten::copy_", "copy"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args<4096ul>)", "communication"),
        ("gloo:all_reduce", "communication"),
        ("c10d::allreduce_", "host"),
        ("_sum_by_sender", "fused kernel"),
        ("aten::transpose", "host"),
        ("aten::select_backward", "memory-bound"),
        ("autograd::engine::evaluate_function: MulBackward0", "host"),
        ("MulBackward0", "host"),
    ],
)  # fmt: skip
def test_a_name_tells_the_class(name, expected):
    assert profile.classify(name) == expected


def test_classes_add_up_the_kernels_of_each():
    kernels = [Span("Memcpy HtoD", 0, 3), Span("Memset", 3, 1), Span("gemm", 4, 9)]
    found = profile.by_class(profile.by_name(kernels))
    assert found == {"matrix product": Total(9, 1), "copy": Total(4, 2)}
    assert list(found) == ["matrix product", "copy"]


def test_the_last_rank_to_arrive_waits_for_none():
    assert profile.waiting_shares([[10, 10], [4, 10], [10, 5]]) == pytest.approx(
        [11 / 20, 5 / 14, 6 / 15]
    )
    assert profile.waiting_shares([[5, 5]]) == [0.0]
    assert profile.waiting_shares([[], []]) == [0.0, 0.0]


def test_ranks_with_unequal_numbers_of_collectives_are_compared_by_their_sums():
    assert profile.waiting_shares([[5, 5], [5]]) == [0.5, 0.0]


def test_gains_divide_idle_time_and_bare_communication_among_their_causes():
    # Two steps: 60 computing, 20 communicating of which 10 overlapped, 30 idle of 100.
    kernels = [Span("gemm", 10, 60), Span("nccl", 60, 20, stream=1)]
    found = profile.gains(
        kernels,
        (0, 100),
        2,
        data=[Span("wait", 0, 6), Span("wait", 20, 30)],
        ranks=[Span("gloo:all_reduce", 4, 6), Span("gloo:all_reduce", 90, 5)],
        waiting_share=0.5,
    )
    assert found == profile.Gains(host=15 - 3 - 4.5, data=3, ranks=4.5 + 2.5, communication=2.5)


def test_idle_time_is_that_of_steps_without_the_tracer():
    kernels = [Span("gemm", 0, 60)]
    found = profile.gains(kernels, (0, 100), 1, step=70, data=[Span("wait", 60, 4)])
    assert (found.host, found.data) == (6, 4)
    assert profile.gains(kernels, (0, 100), 1, step=50).host == 0


def test_activations_belong_to_the_module_that_keeps_them_also_in_the_inner_gradient():
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.ones(5, 3, requires_grad=True)

    def loss():
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return force.pow(2).sum()

    weights = list(model.parameters())
    found = saved_bytes_by_module(model, loss, weights)
    assert found["0"].forward == 5 * 3 * 4
    assert found["1"].forward == 5 * 8 * 4
    assert found["0"].gradient == found["1"].gradient == 5 * 8 * 4
    assert found["(outside of modules)"].forward == 5 * 3 * 4
    assert next(iter(found)) == "1"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_counting_leaves_no_graph_behind():
    """One that lives on would spoil the capture of the steps that are profiled next."""
    weight = torch.ones(10, requires_grad=True)

    def accumulation():
        return weight.view_as(weight).grad_fn.next_functions[0][0]

    node = accumulation()
    node.metadata["before"] = True
    outside = torch.nn.Identity()
    saved_bytes_by_module(outside, lambda: (weight * 2).exp().sum())  # exp keeps its own output
    del node
    assert "before" not in accumulation().metadata
