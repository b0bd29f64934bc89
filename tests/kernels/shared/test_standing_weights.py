"""Weights that stand still are rounded and joined once; all others each time."""

import threading

import torch

from bevatron.kernels.shared.standing_weights import once, standing_weights


def made(weight, to=torch.float64):
    return once(lambda: weight.to(to, copy=True), weight, to=to)


def test_inside_without_gradients_it_is_made_once_per_type():
    weight, other = torch.ones(3), torch.ones(3)
    with standing_weights(), torch.no_grad():
        assert made(weight) is made(weight)
        assert made(weight) is not made(other)
        assert made(weight, torch.float16).dtype == torch.float16


def test_results_of_two_functions_are_kept_apart():
    weight = torch.ones(3)
    with standing_weights(), torch.no_grad():
        doubled, halved = once(lambda: 2 * weight, weight), once(lambda: weight / 2, weight)
        assert (float(doubled[0]), float(halved[0])) == (2.0, 0.5)
        assert once(weight.double, weight).dtype == torch.float64
        assert once(weight.half, weight).dtype == torch.float16


def test_a_transposed_view_is_another_weight():
    weight = torch.arange(4.0).view(2, 2)
    with standing_weights(), torch.no_grad():
        assert torch.equal(made(weight), weight.double())
        assert torch.equal(made(weight.t()), weight.t().double())


def test_another_part_of_a_tensor_is_another_weight():
    weight = torch.arange(4.0)
    with standing_weights(), torch.no_grad():
        for view in (weight, weight[:2], weight[2:], weight[::2], weight.view(torch.int32)):
            assert torch.equal(made(view), view.double())


def test_which_of_two_weights_is_absent_tells_results_apart():
    def joined(first, second):
        given = (torch.zeros(3) if each is None else each for each in (first, second))
        return once(lambda: torch.cat([*given]), first, second)

    bias = torch.ones(3)
    with standing_weights(), torch.no_grad():
        assert joined(bias, None).tolist() == [1, 1, 1, 0, 0, 0]
        assert joined(None, bias).tolist() == [0, 0, 0, 1, 1, 1]


def test_outside_it_is_made_every_time():
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert made(weight) is not made(weight)
    with standing_weights():
        assert made(weight) is not made(weight)
        assert made(weight).requires_grad


def test_code_is_compiled_inside_as_one_graph():
    weight = torch.ones(3)
    doubled = torch.compile(lambda w: 2 * made(w), backend="aot_eager", fullgraph=True)
    with standing_weights(), torch.no_grad():
        assert torch.equal(doubled(weight), 2 * made(weight))


def test_nothing_is_kept_after_the_block():
    weight = torch.ones(3)
    with torch.no_grad():
        with standing_weights():
            before = made(weight)
            with standing_weights():
                assert made(weight) is before
            assert made(weight) is before
        weight.add_(1)
        with standing_weights():
            assert torch.equal(made(weight), torch.full((3,), 2.0, dtype=torch.float64))


def test_reused_memory_is_not_mistaken_for_a_freed_weight():
    with standing_weights(), torch.no_grad():
        for number in range(50):
            assert float(made(torch.full((100,), float(number)))[0]) == number


def test_another_thread_keeps_nothing():
    """Weights change there, as where one model is validated while another trains."""
    weight, found = torch.ones(3), []

    def work():
        with torch.no_grad():
            found.extend([made(weight), made(weight)])

    with standing_weights():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found[0] is not found[1]
