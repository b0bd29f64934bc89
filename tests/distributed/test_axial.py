"""One sample over several gloo processes: loss, gradients and traffic are those of one process."""

from dataclasses import replace
from functools import partial

import complex_task
import pytest
import tiny_model
import torch
from benchmarks.parallel import traffic as plan
from graph_ranks import run_ranks

from bevatron.data.padding import pad
from bevatron.data.padding.shape import BatchShape
from bevatron.errors import ConfigError
from bevatron.models.alphafold2.config import EvoformerConfig, TriangleConfig
from bevatron.models.alphafold2.drops import Drops
from bevatron.models.alphafold2.evoformer import Evoformer, EvoformerBlock
from bevatron.models.alphafold2.inputs import model_inputs, reference_inputs
from bevatron.models.alphafold2.losses import FINE_TUNING_WEIGHTS, loss_terms
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.msa_attention import MSAColumnAttention
from bevatron.models.alphafold3.config_trunk import MsaConfig, PairConfig, PairformerConfig
from bevatron.models.alphafold3.msa import MsaBlock
from bevatron.models.alphafold3.pairformer import Pairformer, PairformerBlock, pairs_of
from bevatron.models.common.folding import Checkpointing, OuterProductMean, checkpointing
from bevatron.parallel import windows
from bevatron.parallel.axial import (
    Coming,
    all_rows,
    data_mesh,
    one_of,
    own,
    own_rows,
    shared,
    transposed,
    turned,
)
from bevatron.parallel.axial.collectives import gather, lengths, transpose
from bevatron.parallel.groups import Pending
from bevatron.parallel.mesh import Mesh
from bevatron.parallel.traffic import count_traffic

SEED, CYCLES = 5, 2
S, N, M, C = 5, 7, 6, 8
"""Rows, residues, channels of the alignment and of the pair in blocks of which bytes are counted.

Parts of 5 rows and 7 residues differ on 2, 3 and 4 processes.
"""
EVOFORMER = EvoformerConfig(1, 2, 3, 2, outer_width=4, triangles=TriangleConfig(10, 2, 3, 2))
PAIR = PairConfig(hidden=10, num_heads=2, head_width=3, transition=2)
PAIRFORMER = PairformerConfig(num_blocks=1, num_heads=2, head_width=3, transition=2, pair=PAIR)
MSA = MsaConfig(num_blocks=2, width=M, outer_width=4, num_heads=2, head_width=3, pair=PAIR)
BOTH = (torch.float64, torch.float32)


def seeded(module):
    """Random weights for all parts, which are partly zero at first."""
    torch.manual_seed(0)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.dim() > 1 else 1.0)
    return module


def masked(features, dtype):
    """Features of which some rows, entries of rows and one residue are missing."""
    generator = torch.Generator().manual_seed(2)
    for name in ("msa_mask", "extra_msa_mask"):
        features[name] = (torch.rand(features[name].shape, generator=generator) > 0.3).float()
    features["seq_mask"][3:4] = 0
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in features.items()}


def alphafold2_loss(dtype, residues=9):
    """A loss of all outputs after two cycles, with templates and dropout."""
    torch.manual_seed(0)
    policy = Checkpointing("segments", 2) if dtype == torch.float64 else Checkpointing("paper")
    config = replace(tiny_model.TINY, checkpointing=policy)
    model = tiny_model.random_weights(AlphaFold2(config, dtype=dtype))
    cycles = [
        masked(tiny_model.random_features(number, residues), dtype) for number in range(CYCLES)
    ]
    parts = []
    outputs = model(cycles, torch.tensor(SEED))
    outputs |= {name: all_rows(outputs[name]) for name in ("pair", "distogram_logits", "tm_logits")}
    for _, x in sorted(outputs.items()):
        if x.requires_grad:
            weight = torch.linspace(0.3, 1.0, x.numel(), dtype=torch.float64).view(x.shape).cos()
            parts.append((weight * x).mean())
    return model, torch.stack(parts).sum()


def alphafold2_terms(dtype, batch):
    """All terms of the loss in fine-tuning."""
    config = replace(tiny_model.TINY, checkpointing=Checkpointing("none"))
    model = tiny_model.random_weights(AlphaFold2(config, dtype=dtype))
    given = batch.to("cpu", dtype).tensors()
    inputs, reference = (
        {name: x.to(dtype) if x.is_floating_point() else x for name, x in make(given, 0).items()}
        for make in (model_inputs, reference_inputs)
    )
    weights = replace(FINE_TUNING_WEIGHTS, tm=0.1)
    terms = loss_terms(model([inputs], torch.tensor(SEED)), reference, weights)
    return model, torch.stack([*terms.values()]).sum()


def alphafold3_loss(dtype, batch, kept=None):
    """The loss of the task after two cycles, with rollout and confidences.

    Of three processes one has none of the two copies; five are divided unequally.
    """
    model = complex_task.model_of().to(dtype)
    # Biases are gathered in every pass in one type, and once in the other.
    kept = kept or ("all" if dtype == torch.float64 else "none")
    model.diffusion.transformer.checkpointing = Checkpointing(kept)
    if dtype == torch.float64:
        model.trunk.pairformer.checkpointing = Checkpointing("segments", 2)
    task, _ = complex_task.task_of(copies=2 if dtype == torch.float64 else 5)
    task.cycles = CYCLES
    moved = batch.to("cpu", dtype)
    return model, task.loss(model, moved, task.normalisers(moved)).total


def with_evidence(crop, rows=5):
    """A crop with random rows of an alignment and random templates."""
    generator = torch.Generator().manual_seed(3)
    tokens = crop.msa.shape[1]

    def whole(*shape):
        return torch.randint(0, 20, shape, generator=generator).to(crop.msa.dtype)

    return replace(
        crop,
        msa=whole(rows, tokens),
        deletion=whole(rows, tokens).to(crop.deletion.dtype),
        msa_mask=whole(rows, tokens) > 5,
        template_restype=whole(*crop.template_restype.shape),
        template_pseudo_beta=whole(*crop.template_pseudo_beta.shape).double(),
        template_pseudo_beta_mask=whole(*crop.template_restype.shape) > 3,
        template_backbone=torch.randn(crop.template_backbone.shape, generator=generator).double(),
        template_backbone_mask=whole(*crop.template_restype.shape) > 3,
    )


def summed(loss_of, size):
    """Loss and gradients, each process's share added up as the trainer adds them."""
    model, loss = loss_of()
    loss = loss / size
    loss.backward()
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {"loss": loss.detach(), **named}
    if size > 1:
        joint = torch.cat([x.flatten() for x in found.values()])
        torch.distributed.all_reduce(joint)
        parts = joint.split([x.numel() for x in found.values()])
        found = {name: part.view_as(found[name]) for name, part in zip(found, parts, strict=True)}
    return found


def agree(one, other, tolerance):
    """Whether all gradients agree within a share of the largest, and the losses."""
    assert one.keys() == other.keys()
    largest = max(float(x.abs().max()) for n, x in one.items() if n != "loss")
    for name, x in one.items():
        error = float((x - other[name]).abs().max())
        assert error <= tolerance * (abs(float(x)) if name == "loss" else largest), (name, error)


@pytest.fixture(scope="module")
def batch(shared, tmp_path_factory):
    crop = complex_task.crop_of_1pfe(shared, tmp_path_factory.mktemp("components") / "index")
    crop = with_evidence(crop)
    unpadded = {name: crop.sizes[name] for name in crop.padding.names}
    return pad(crop, BatchShape(**{**unpadded, "tokens": 31, "rows": 7}))


@pytest.fixture(scope="module", autouse=True)
def _short_rollout():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bevatron.models.alphafold3.task.ROLLOUT_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def expected(batch, chain):
    """Loss and gradients of one process, by model and type."""
    cases = {
        ("alphafold2", torch.float64): lambda: alphafold2_loss(torch.float64),
        ("alphafold2", torch.float32): lambda: alphafold2_loss(torch.float32),
        ("terms", torch.float64): lambda: alphafold2_terms(torch.float64, chain),
        ("alphafold3", torch.float64): lambda: alphafold3_loss(torch.float64, batch),
        ("alphafold3", torch.float32): lambda: alphafold3_loss(torch.float32, batch),
    }
    return cases, {case: summed(loss_of, 1) for case, loss_of in cases.items()}


def collectives(group, size):
    """Every collective along every axis, and its gradient, against what they mean."""
    make = torch.Generator().manual_seed(1)
    for dtype, wide, tolerance in (
        (torch.float64, torch.float64, 1e-12),
        (torch.bfloat16, torch.float32, 0),
    ):
        random = torch.randn(1 + size, 3, 7, 5, 4, generator=make, dtype=torch.float64)
        whole, *others = random.to(dtype)  # and a gradient of each process
        other = others[0]
        for dim in (-3, -2, 0):
            part = own(whole, dim).clone().requires_grad_()
            found = gather(part, dim, whole.shape[dim], group).wait()
            assert torch.equal(found, whole)
            (gradient,) = torch.autograd.grad(found, part, others[group.index])
            summed_up = sum(own(x, dim).to(wide) for x in others).to(dtype)  # rounded once
            torch.testing.assert_close(gradient, summed_up, rtol=tolerance, atol=tolerance)
        rows = own_rows(whole).clone().requires_grad_()
        found = transpose(rows, 7, group).wait()
        assert torch.equal(found, own_rows(whole.transpose(-2, -3)))
        (gradient,) = torch.autograd.grad(found, rows, own_rows(other.transpose(-2, -3)))
        assert torch.equal(gradient, own_rows(other))
    narrow = torch.randn(5, size, 2, generator=make)  # one column and 8 bytes of channels for each
    found = transpose(own_rows(narrow).clone(), 5, group).wait()
    assert torch.equal(found, own_rows(narrow.transpose(0, 1)))


def sent_by(block, *given):
    """Bytes that this process sends in a block and its gradient."""
    with count_traffic() as traffic:
        sum(x.sum() for x in seeded(block)(*given)).backward()
    return traffic.total


def sent_by_blocks():
    """Of the Evoformer, the Pairformer and the MSA module."""
    m, z = (own_rows(torch.randn(rows, N, width)) for rows, width in ((S, M), (N, C)))
    m, z, s = m.requires_grad_(), z.requires_grad_(), torch.randn(N, M, requires_grad=True)
    rows, tokens = torch.ones(S, N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
    evoformer = EvoformerBlock(M, C, EVOFORMER, MSAColumnAttention, Checkpointing())
    return [
        sent_by(evoformer, (m, z), rows, pairs_of(tokens)),
        sent_by(PairformerBlock(M, C, PAIRFORMER, Checkpointing()), (s, z), tokens),
        sent_by(MsaBlock(C, MSA, Checkpointing(), last=False), (m, z), rows, tokens),
    ]


def planned_bytes(index, size):
    evoformer = [
        *plan.pair_bias(N, EVOFORMER.num_heads),
        *plan.columns(S, N, M, EVOFORMER.outer_width),
        *plan.triangles(N, C, EVOFORMER.triangles.hidden, EVOFORMER.triangles.num_heads),
    ]
    triangles = plan.triangles(N, C, PAIR.hidden, PAIR.num_heads)
    pairformer = [*triangles, plan.Collective("gather", N, 1, M)]
    msa = [
        *plan.outer_product(S, N, MSA.outer_width),
        *plan.pair_bias(N, MSA.num_heads),
        *triangles,
    ]
    return [plan.step_bytes(block, index, size) for block in (evoformer, pairformer, msa)]


def check(tmp_path, expected, size, types):
    sent = compared(tmp_path, expected, size, types)
    assert sent == [planned_bytes(index, size) for index in range(size)]


def compared(tmp_path, expected, size, types):
    """Compare several processes with one; return what each sends in blocks."""
    references = {case: found for case, found in expected[1].items() if case[1] in types}
    cases = {case: expected[0][case] for case in references}

    def work(mesh):
        with shared(mesh, size) as group:
            collectives(group, size)
            for number, loss_of in enumerate(cases.values()):
                found = summed(loss_of, size)
                if mesh.rank == 0:
                    torch.save(found, tmp_path / str(number))
            return sent_by_blocks()

    sent = run_ranks(size, work, tmp_path)
    for number, ((_, dtype), reference) in enumerate(references.items()):
        found = torch.load(tmp_path / str(number))
        agree(reference, found, 1e-9 if dtype == torch.float64 else 1e-4)
    return sent


@pytest.mark.parametrize("size", [2, 3])
def test_loss_every_gradient_and_bytes_equal_those_of_one_process_and_the_plan(
    tmp_path, expected, size
):
    check(tmp_path, expected, size, BOTH)


def test_rings_of_three_processes_for_long_crops_equal_one(tmp_path, expected, monkeypatch):
    """They fill up no rows: two of each block's exchanges send fewer of them."""
    monkeypatch.setattr(windows, "WINDOW", 0)
    sent = compared(tmp_path, expected, 3, (torch.float64,))
    each = lengths(N, 3)
    for index, found in enumerate(sent):
        spared = 2 * each[0] - (N - each[index - 1])
        fewer = 2 * 4 * spared * N * PAIR.hidden
        assert found == [planned - fewer for planned in planned_bytes(index, 3)]


def test_layers_of_large_pairs_that_run_again_equal_one(tmp_path, expected, monkeypatch):
    """Their exchanges do too, in the backward pass."""
    monkeypatch.setattr(checkpointing, "LARGE_PAIR", 0)
    sent = compared(tmp_path, expected, 2, (torch.float64,))
    for index, (_, *of_alphafold3) in enumerate(sent):
        planned = planned_bytes(index, 2)[1:]
        assert all(x > y for x, y in zip(of_alphafold3, planned, strict=True))


@pytest.mark.parametrize("system", ["alphafold2", "alphafold3"])
def test_recomputed_blocks_exchange_nothing_for_the_next(system):
    """The transposed alignment or pair: nobody reads it a second time."""
    blocks = 3
    rows, tokens = torch.ones(S, N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
    m, z, s = torch.randn(S, N, M), torch.randn(N, N, C), torch.randn(N, M)

    def sent(policy):
        """By a stack in its forward pass, and in both."""
        if system == "alphafold2":
            stack = Evoformer(M, C, 6, replace(EVOFORMER, num_blocks=blocks), policy)
            given = own_rows(m).requires_grad_(), own_rows(z), rows, pairs_of(tokens), Drops(None)
        else:
            stack = Pairformer(M, C, replace(PAIRFORMER, num_blocks=blocks), policy)
            given = s, own_rows(z).requires_grad_(), tokens, pairs_of(tokens)
        with count_traffic() as traffic:
            total = sum(x.sum() for x in stack(*given))
            forward = traffic.total
            total.backward()
        return forward, traffic.total

    with one_of(2):
        (forward, kept), (_, again) = map(sent, (Checkpointing("none"), Checkpointing("all")))
        with count_traffic() as turn:
            turned(own_rows(m.transpose(0, 1) if system == "alphafold2" else z), N).wait()
        with count_traffic() as around:
            if system == "alphafold2":
                transposed(transposed(own_rows(z)))
                all_rows(own_rows(m), S)
    assert again == kept + forward - around.total - blocks * turn.total


class SharedFiles:
    """Windows in files that every process maps, in place of GPUs that read each other's memory."""

    def __init__(self, group, folder):
        self.group, self.index = group.process_group, group.index
        size, made = 2 * windows.WINDOW, [folder / f"window{rank}" for rank in group.ranks]
        self.memory = [torch.from_file(str(p), True, size, dtype=torch.uint8) for p in made]

    def barrier(self):
        torch.distributed.barrier(self.group)

    def get_buffer(self, rank, shape, dtype, at):
        size = dtype.itemsize
        place = self.memory[rank][at * size : (at + torch.Size(shape).numel()) * size]
        return place.view(dtype).view(shape)


@pytest.mark.parametrize(("size", "captured"), [(2, True), (3, False)])
def test_processes_that_read_each_others_memory_equal_one(
    tmp_path, expected, monkeypatch, size, captured
):
    monkeypatch.setattr(windows, "WINDOW", 2**14)  # what is larger goes the usual way
    monkeypatch.setattr(windows, "LARGE", 2**7)
    monkeypatch.setattr(windows, "capturing", lambda: captured)
    monkeypatch.setattr(
        windows,
        "opened",
        lambda group, _: windows.WindowGroup(group, windows.Windows(SharedFiles(group, tmp_path))),
    )
    check(tmp_path, expected, size, (torch.float64,))


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 6, 8])
def test_many_processes_equal_one(tmp_path, expected, size):
    check(tmp_path, expected, size, BOTH)


@pytest.mark.parametrize(("tokens", "size"), [(2, 3), (1, 2)])
def test_more_processes_than_tokens_equal_one(request, tmp_path, tokens, size):
    """Some have no rows of the pair; the others may have all of them, and exchange all the same."""
    folder = request.getfixturevalue("shared")
    crop = with_evidence(complex_task.crop_of_1pfe(folder, tmp_path / "index", tokens))
    cases = {
        ("alphafold2", torch.float64): partial(alphafold2_loss, torch.float64, tokens),
        ("gathered in every pass", torch.float64): partial(alphafold3_loss, torch.float64, crop),
        ("once", torch.float64): partial(alphafold3_loss, torch.float64, crop, "none"),
    }
    expected = {case: summed(loss_of, 1) for case, loss_of in cases.items()}
    compared(tmp_path, (cases, expected), size, BOTH)


def published_numbers(size, m=256, c=128, hidden=128, heads=4, row_heads=8, outer=32):
    """Numbers that a process sends per pair of residues in ScaleFold's scheme, S = N.

    Gathers of own rows, all-reduces of the whole in the backward pass, exchanges of own rows.
    """
    others = size - 1
    gathers = others / size * (row_heads + outer + 2 * hidden + 2 * heads)
    exchanges = others / size**2 * (2 * m + 4 * c)
    return 3 * gathers + 2 * exchanges


@pytest.mark.parametrize(("size", "share"), [(2, 0.71), (4, 0.70), (8, 0.68)])
def test_a_block_sends_less_than_the_published_scheme(size, share):
    rows = tokens = 256
    of_block = [
        *plan.pair_bias(tokens, 8),
        *plan.columns(rows, tokens, 256, 32),
        *plan.triangles(tokens, 128, 128, 4),
    ]
    ours = plan.step_bytes(of_block, 0, size, word_bytes=1) / tokens**2
    assert round(ours / published_numbers(size), 2) == share


def test_rows_are_divided_evenly_and_processes_into_whole_groups():
    assert lengths(10, 4) == [3, 3, 2, 2]
    assert lengths(2, 3) == [1, 1, 0]
    assert [data_mesh(Mesh(rank=r, world=6), 3).rank for r in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"parallel\.axial: 6 processes .* groups of 4; start"):
        data_mesh(Mesh(rank=0, world=6), 4)


def test_rows_of_an_alignment_are_counted_in_32_bits(monkeypatch):
    counts = []
    name = "bevatron.parallel.axial.outer_product.layer_of_products"
    monkeypatch.setattr(name, lambda a, b, count, *_: counts.append(count) or a.new_zeros(2, 4, C))
    operator = OuterProductMean(M, 2, C)
    mask = torch.ones(1001, 4, dtype=torch.bool)
    with one_of(2), torch.autocast("cpu", torch.bfloat16):
        operator(own_rows(torch.randn(1001, 4, M)), mask)
    assert torch.equal(counts[0], torch.full((2, 4), 1001.001))


def test_rows_that_are_not_a_process_s_part_of_all_are_refused():
    """Those of an alignment without its number of rows, which would come back in wrong order."""
    with one_of(2):
        for exchange in (all_rows, transposed):
            with pytest.raises(ValueError, match="process 0 of 2 has 4 of 5 rows, expected 3"):
                exchange(torch.randn(4, 5, 2))


def test_on_one_process_nothing_is_copied():
    x = torch.randn(3, 3, 2)
    assert own_rows(x) is x
    assert all_rows(x) is x


def test_work_between_beginning_and_waiting_goes_on_beside_the_exchange_both_ways():
    launched = []

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            launched.append("work")
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            launched.append("work back")
            return 2 * grad

    def exchange(name):
        def begin(x):
            launched.append(f"{name} begins")
            return Pending(3 * x).then(lambda found: launched.append(f"{name} ends") or found)

        return begin

    given, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    coming = Coming(given, exchange("there"), exchange("back"))
    product = Between.apply(other)
    whole = coming.wait()
    gradients = torch.autograd.grad((product * whole).sum(), [given, other])
    assert [x.tolist() for x in (whole, *gradients)] == [[3, 3], [6, 6], [6, 6]]
    assert launched == [
        *("there begins", "work", "there ends"),
        *("back begins", "work back", "back ends"),
    ]
