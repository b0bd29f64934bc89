"""What depends on a layout is computed once for it, and anew for every other."""

import torch

from bevatron.kernels.shared import layouts
from bevatron.kernels.shared.launch import planned_for_gpu
from bevatron.kernels.shared.layouts import per_layout


@per_layout
def described(x, *others):
    return object()


def test_tensors_that_differ_only_in_values_have_one_layout():
    assert described(torch.ones(3, 2), None, 2) is described(torch.zeros(3, 2), None, 2)


def test_shapes_strides_types_devices_and_other_arguments_tell_layouts_apart():
    x = torch.ones(4, 4)
    found = [
        described(x),
        described(x[:2]),
        described(x.t()),
        described(x.half()),
        described(x, x),
        described(x, x.t()),
        described(x, x.half()),
        described(x, None),
        described(x, True),
        described(x, 2),
    ]
    with planned_for_gpu():
        found.append(described(x))
    assert len(set(found)) == len(found)


def test_the_number_of_layouts_that_are_kept_is_bounded(monkeypatch):
    calls = []

    @per_layout
    def length(x):
        calls.append(len(x))
        return len(x)

    monkeypatch.setattr(layouts, "MOST_LAYOUTS", 2)
    for n in (1, 2, 1, 3, 1):
        assert length(torch.ones(n)) == n
    assert calls == [1, 2, 3, 1]
