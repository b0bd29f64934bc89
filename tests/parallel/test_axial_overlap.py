"""What runs while processes that share a sample exchange rows, and by which communicator."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bevatron.kernels import use
from bevatron.models.alphafold2.config import EvoformerConfig, TriangleConfig
from bevatron.models.alphafold2.evoformer import EvoformerBlock
from bevatron.models.alphafold2.msa_attention import MSAColumnAttention
from bevatron.models.alphafold3.config_trunk import PairConfig, PairformerConfig
from bevatron.models.alphafold3.pairformer import Pairformer, pairs_of
from bevatron.models.common.folding import Checkpointing
from bevatron.parallel.axial import contraction, groups, own_rows
from bevatron.parallel.groups import Silent
from bevatron.parallel.mesh import Mesh

S, N, M, C = 5, 7, 6, 8
EVOFORMER = EvoformerConfig(1, 2, 3, 2, outer_width=4, triangles=TriangleConfig(10, 2, 3, 2))
PAIR = PairConfig(hidden=10, num_heads=2, head_width=3, transition=2)
PAIRFORMER = PairformerConfig(num_blocks=2, num_heads=2, head_width=3, transition=2, pair=PAIR)


class Matmuls(TorchDispatchMode):
    """Counts matmuls, which stand for all work."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator.__name__.split(".")[0] in {"mm", "bmm", "addmm", "baddbmm_"}
        return operator(*args, **(kwargs or {}))


@dataclass
class Exchange:
    """In flight from the number of matmuls at which it begins to that at which it is awaited."""

    kind: str
    work: Matmuls
    began: int
    between: int | None = None

    def wait(self):
        self.between = self.work.number - self.began


class Noting(Silent):
    """A silent group that notes its exchanges."""

    def __init__(self, size, work, notes, urgent=""):
        super().__init__(size)
        self.given, self.kind = (work, notes), urgent

    @property
    def urgent(self):
        return Noting(self.size, *self.given, "urgent ")

    def _noted(self, kind, pending):
        work, notes = self.given
        pending.work = Exchange(self.kind + kind, work, work.number)
        notes.append(pending.work)
        return pending

    def gather(self, *given, **named):
        return self._noted("gather", super().gather(*given, **named))

    def trade(self, *given):
        return self._noted("trade", super().trade(*given))

    def pass_on(self, *given):
        return self._noted("pass on", super().pass_on(*given))


def of(notes):
    """Kinds of exchanges in the order in which they begin; in brackets those without work."""
    assert all(note.between is not None for note in notes), "nobody waited"
    return [note.kind if note.between else f"({note.kind})" for note in notes]


def exchanges(monkeypatch, run, given):
    """Those of a block of the first of two processes, forward and backward."""
    work, notes = Matmuls(), []
    monkeypatch.setattr(groups, "Silent", lambda size: Noting(size, work, notes))
    with groups.one_of(2), use("reference"), work:
        total = sum(x.sum() for x in run(*given()))
        forward = [*notes]
        total.backward()
    return of(forward), of(notes[len(forward) :])


def random(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_exchanges_of_an_evoformer_block(monkeypatch):
    block = EvoformerBlock(M, C, EVOFORMER, MSAColumnAttention, Checkpointing())
    masks = torch.ones(S, N, dtype=torch.bool), torch.ones(N, N, dtype=torch.bool)
    forward, backward = exchanges(
        monkeypatch,
        lambda *state: block(state, *masks),
        lambda: (own_rows(random(S, N, M)), own_rows(random(N, N, C))),
    )
    assert forward == [
        "gather",  # bias of row attention
        "(urgent trade)",  # alignment to columns
        "trade",  # pair to rows, during column attention
        "gather",  # outer product
        "trade",  # alignment to rows, during the pair's update
        *("urgent pass on", "(urgent pass on)"),  # triangle multiplications
        "gather",  # bias of the starting node
        *("urgent trade", "gather"),  # pair to columns, bias of the ending node
    ]
    assert backward == [
        *("trade", "trade", "urgent trade", "trade"),
        *("pass on", "pass on"),
        *("trade", "(trade)", "(urgent trade)", "trade"),
    ]


def test_exchanges_of_pairformer_blocks(monkeypatch):
    blocks = Pairformer(M, C, PAIRFORMER, Checkpointing())
    tokens = torch.ones(N, dtype=torch.bool)
    forward, backward = exchanges(
        monkeypatch,
        lambda s, z: blocks(s, z, tokens, pairs_of(tokens)),
        lambda: (random(N, M), own_rows(random(N, N, C))),
    )
    pair = ["urgent pass on", "(urgent pass on)", "gather", "urgent trade", "gather"]
    assert forward == [
        *pair,
        "(trade)",  # pair to rows: nothing of s is there yet
        *pair,
        "trade",  # during the attention of s
        *("(gather)", "(gather)"),  # s, when no block of the pair is left
    ]
    of_pair = ["trade", "trade", "urgent trade", "trade", "pass on", "pass on"]
    assert backward == ["(trade)", "(trade)", *of_pair, "(trade)", *of_pair[1:]]


@pytest.mark.parametrize(
    ("way", "outgoing", "forward", "backward"),
    [
        ("AtOnce", True, ["(urgent gather)"], ["trade"]),
        ("AtOnce", False, ["(urgent trade)"], ["gather"]),
        ("Rings", True, 2 * ["urgent pass on"], ["(pass on)", "pass on"]),
        ("Rings", False, 2 * ["(urgent pass on)"], 2 * ["pass on"]),
    ],
)
def test_exchanges_of_a_contraction(way, outgoing, forward, backward):
    """Other work runs beside those of the gradient."""
    work, notes, in_flight = Matmuls(), [], []
    group = Noting(3, work, notes)
    a, b, x, da, db = (torch.randn(2, 3, 7) for _ in range(5))

    def meanwhile():
        in_flight.extend(note for note in notes if note.between is None)
        a @ b.mT

    with work:
        how = getattr(contraction, way)(group)
        kept = how.contract(a, b, x, outgoing)
        assert of(notes) == forward
        notes.clear()
        how.contract_backward(x, a, b, kept, da, db, outgoing, meanwhile)
    assert of(notes) == backward
    assert len(in_flight) == 1


def test_a_group_of_all_processes_has_a_communicator_of_its_own(monkeypatch):
    """Gradient sums, which use that of the run, need not wait for its exchanges."""
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks: ("of", *ranks))
    with groups.shared(Mesh(rank=0, world=2), 2) as group:
        assert group.process_group == ("of", 0, 1)
