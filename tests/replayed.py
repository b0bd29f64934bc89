"""CUDA graphs of a step, for tests that compare their replay with the step itself."""

import gc
from collections.abc import Callable, Sequence

import torch


def captured(step: Callable[[], Sequence[torch.Tensor]]):
    """Capture a step after a rehearsal in a side stream; return its graph and its results."""
    gc.collect()  # first checks of annotations leave cycles; a graph of autograd in them spoils it
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # it makes what the step reads
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def check_replay(step: Callable[[], Sequence[torch.Tensor]], change: Callable[[], object]):
    """Compare a replay on changed inputs with the step, bit for bit."""
    graph, found = captured(step)
    change()
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(found, step(), strict=True):
        assert torch.equal(got, want)
