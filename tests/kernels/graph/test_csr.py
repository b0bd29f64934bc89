"""The sparse matrix that graph operators run on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.errors import DataError
from bevatron.kernels import Csr
from bevatron.kernels.graph.csr import launch, ordering, work
from bevatron.kernels.graph.csr.dropout import as_seed, keep_mask


def random_entries(rows, columns, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    entries = (torch.rand(rows, columns, generator=generator) < density).nonzero()
    return entries[torch.randperm(len(entries), generator=generator)].unbind(1)


def dense(csr):
    matrix = torch.zeros(csr.shape, dtype=torch.float64)
    values = torch.ones(csr.nnz, dtype=torch.float64) if csr.values is None else csr.values
    matrix[csr.row_index.long(), csr.col.long()] = values.double()
    return matrix


@given(rows=st.integers(0, 9), columns=st.integers(0, 9), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_both_orders_hold_the_same_matrix(rows, columns, seed):
    row, col = random_entries(rows, columns, 0.4, seed)
    values = torch.arange(1.0, len(row) + 1)
    csr = Csr.from_coo(row, col, (rows, columns), values)
    expected = torch.zeros(rows, columns, dtype=torch.float64)
    expected[row, col] = values.double()
    assert torch.equal(dense(csr), expected)
    assert torch.equal(dense(csr.transpose()), expected.T)
    assert torch.equal(csr.values[csr.position], csr.values_by_column)
    assert torch.equal(dense(csr.transpose().transpose()), expected)
    by_column = csr.col.long()[csr.position]
    assert bool((by_column.diff() >= 0).all())
    assert bool((csr.col.diff() > 0)[csr.row_index.diff() == 0].all())


def test_pieces_give_the_same_order(monkeypatch):
    row, col = random_entries(40, 30, 0.3)
    whole = Csr.from_coo(row, col, (40, 30), torch.randn(len(row)))
    monkeypatch.setattr(ordering, "PIECE", 37)
    pieces = Csr.from_csr(whole.row_ptr, whole.col, (40, 30), whole.values)
    shuffled = Csr.from_coo(row, col, (40, 30))
    for name in ("row_ptr", "col", "col_ptr", "row_of", "position"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name)), name
        assert torch.equal(getattr(whole, name), getattr(shuffled, name)), name
    with pytest.raises(DataError, match="row 3 and column 4 is there twice"):
        Csr.from_coo(
            torch.cat([row[(row != 3) | (col != 4)], torch.tensor([3, 3])]),
            torch.cat([col[(row != 3) | (col != 4)], torch.tensor([4, 4])]),
            (40, 30),
        )


def test_types_are_the_smallest_that_fit():
    csr = Csr.from_coo(torch.tensor([0]), torch.tensor([1]), (2, 2))
    assert csr.col.dtype == csr.row_of.dtype == csr.position.dtype == torch.int32
    assert csr.row_ptr.dtype == csr.col_ptr.dtype == torch.int64
    assert ordering.index_type(2**31) == torch.int64


def test_non_integer_indices_are_refused_by_type():
    for index in (torch.tensor([0.0, 1.0]), torch.tensor([True, False]), torch.zeros(0)):
        with pytest.raises(DataError, match=r"Csr: the rows of the entries are .*, expected whole"):
            ordering.check_indices("row", index, 3)


def test_rows_in_order_may_have_columns_of_a_small_type():
    columns = torch.zeros(200, dtype=torch.int8)
    csr = Csr.from_csr(torch.arange(201), columns, (200, 1))
    assert csr.row_index.tolist() == list(range(200))


@pytest.mark.parametrize(
    ("row", "col", "message"),
    [
        ([0, -1], [0, 0], "entry 1 has the row -1, expected 0 to 2"),
        ([0, 1], [0, 4], "entry 1 has the column 4, expected 0 to 3"),
        ([2, 0, 2], [3, 0, 3], r"row 2 and column 3 is there twice \(1 such\)"),
    ],
)
def test_bad_entries_are_refused_by_name(row, col, message):
    with pytest.raises(DataError, match=message):
        Csr.from_coo(torch.tensor(row), torch.tensor(col), (3, 4))


def test_lengths_that_do_not_fit_are_refused():
    two, three = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    from_coo = Csr.from_coo.__func__.__wrapped__  # not stopped by the tests' checks of shapes
    with pytest.raises(ValueError, match="one length"):
        from_coo(Csr, two, three, (3, 3))
    with pytest.raises(ValueError, match="values have shape"):
        from_coo(Csr, three, three, (3, 3), torch.ones(2))
    with pytest.raises(ValueError, match="row_ids"):
        from_coo(Csr, three, three, (3, 3), row_ids=two)
    with pytest.raises(ValueError, match="values have shape"):
        Csr.from_coo(three, three, (3, 3)).with_values(torch.ones(2))
    with pytest.raises(ValueError, match="row_ptr has shape"):
        Csr.from_csr(three, three, (3, 3))
    with pytest.raises(DataError, match="row_ptr runs from 0 to 2"):
        Csr.from_csr(torch.tensor([0, 1, 1, 2]), three, (3, 3))


def test_gradients_reach_the_values_that_were_given():
    row, col = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1])
    values = torch.tensor([2.0, 3.0, 5.0], requires_grad=True)
    csr = Csr.from_coo(row, col, (2, 2), values)
    (csr.values * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad.tolist() == [10.0, 1.0, 100.0]


def test_symmetry_is_that_of_structure_and_values():
    row, col = torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])
    csr = Csr.from_coo(row, col, (3, 3))
    assert csr.is_symmetric
    assert csr.with_values(torch.tensor([4.0, 4.0, 1.0])).is_symmetric
    assert not csr.with_values(torch.tensor([4.0, 5.0, 1.0])).is_symmetric
    assert not csr.with_values(torch.ones(3, requires_grad=True)).is_symmetric
    assert not Csr.from_coo(row[:1], col[:1], (3, 3)).is_symmetric


def test_long_rows_have_a_warp_and_short_ones_share_one():
    ptr = torch.tensor([0, *([200] * 9), *([40] * 50), *([3] * 70), *([1] * 3000)]).cumsum(0)
    made = work.make_work(ptr)
    numbers = [made.num_slots, len(made.row), *made.lengths]
    long, middling, short = launch.lane_buckets(numbers, 32, launch.Tile(1024, 32), 4)
    assert [bucket.count for bucket in (long, middling, short)] == [9, 120, 3000]
    # 32 numbers of four bytes are eight lanes of sixteen; a long row is dealt out to four groups.
    assert (long.rows, long.entries) == (middling.rows, middling.entries) == (4, 8)
    assert [bucket.programs for bucket in (long, middling, short)] == [9, 30, 188]
    assert [bucket.dealt for bucket in (long, middling, short)] == [True, False, False]
    assert [bucket.filled for bucket in (long, middling, short)] == [True, True, False]
    assert (short.rows, short.entries) == (16, 1)
    assert short.first + short.count == len(made.row)
    half = launch.lane_buckets(numbers, 32, launch.Tile(1024, 32), 2)[1]
    assert (half.rows, half.entries) == (8, 4)


@given(lengths=st.lists(st.integers(0, 70), max_size=12), chunk=st.sampled_from([1, 2, 8, 256]))
@settings(max_examples=40, deadline=None)
def test_work_covers_every_entry_once(lengths, chunk):
    ptr = torch.tensor([0, *lengths]).cumsum(0)
    before, work.SMALLEST_CHUNK = work.SMALLEST_CHUNK, chunk
    try:
        made = work.make_work(ptr)
    finally:
        work.SMALLEST_CHUNK = before
    covered = torch.zeros(int(ptr[-1]), dtype=torch.int64)
    slots = {}
    for row, start, length, slot in zip(
        made.row.tolist(), made.start.tolist(), made.length.tolist(), made.slot.tolist(),
        strict=True,
    ):  # fmt: skip
        covered[start : start + length] += 1
        assert ptr[row] <= start
        assert start + length <= ptr[row + 1]
        assert length <= made.chunk
        if slot >= 0:
            slots[slot] = (row, start)
        else:
            assert length == lengths[row]
    assert covered.eq(1).all()
    assert sorted(made.length.tolist(), reverse=True) == made.length.tolist()
    assert len(slots) == made.num_slots == int(made.cut_ptr[-1])
    # A cut row's slots follow each other, its parts in their order.
    for i, row in enumerate(made.cut_row.tolist()):
        own = [slots[s] for s in range(made.cut_ptr[i], made.cut_ptr[i + 1])]
        assert [o[0] for o in own] == [row] * len(own)
        assert own == sorted(own)
    assert set(range(len(lengths))) == set(made.row.tolist())
    counted = [int((made.length >= 2**place).sum()) for place in range(len(made.lengths))]
    assert list(made.lengths) == counted
    assert 2 ** len(counted) > made.chunk


def test_moving_keeps_everything():
    row, col = random_entries(5, 6, 0.5)
    csr = Csr.from_coo(row, col, (5, 6), torch.randn(len(row)), row_ids=torch.arange(5) + 7)
    assert csr.to("cpu") is csr
    moved = csr.to("meta")
    assert moved.row_work.row.device.type == moved.position.device.type == "meta"
    assert moved.row_ids.device.type == "meta"
    assert (moved.nnz, moved.shape) == (csr.nnz, csr.shape)


def test_values_changed_in_place_are_seen_in_both_orders():
    row, col = torch.tensor([0, 1]), torch.tensor([1, 0])
    csr = Csr.from_coo(row, col, (2, 2), torch.tensor([1.0, 1.0]))
    assert csr.is_symmetric
    assert csr.values_by_column is csr.values_by_column
    csr.values[0] = 5.0
    assert csr.values_by_column.tolist() == [1.0, 5.0]
    csr.values[1] = 7.0
    assert not csr.is_symmetric
    copy = csr.pin_memory() if torch.cuda.is_available() else csr._map(torch.Tensor.clone)
    copy.values.fill_(3.0)
    assert copy.values_by_column.tolist() == [3.0, 3.0]
    assert copy.is_symmetric
    with torch.inference_mode():
        kept = Csr.from_coo(row, col, (2, 2), torch.tensor([1.0, 2.0]))
        assert kept.values_by_column.tolist() == [2.0, 1.0]


def test_mask_of_a_block_is_the_block_of_the_mask():
    row, col = random_entries(20, 20, 0.5)
    whole = Csr.from_coo(row, col, (20, 20))
    seed = as_seed(11, torch.device("cpu"))
    mask = keep_mask(whole, seed, 3, 0.4)
    ids = torch.arange(20)
    inside = (whole.row_index >= 5) & (whole.col >= 8)
    block = Csr.from_coo(
        whole.row_index[inside] - 5, whole.col[inside] - 8, (15, 12),
        row_ids=ids[5:], col_ids=ids[8:],
    )  # fmt: skip
    assert torch.equal(keep_mask(block, seed, 3, 0.4), mask[inside])


def test_mask_drops_the_requested_fraction_and_differs_by_head_and_seed():
    row, col = random_entries(200, 200, 0.6)
    csr = Csr.from_coo(row, col, (200, 200))
    masks = torch.cat([keep_mask(csr, as_seed(seed, csr.device), 2, 0.3) for seed in (1, 2**40)], 1)
    assert set(masks.unique().tolist()) == {0.0, 1.0 / 0.7}
    kept = (masks > 0).double()
    assert torch.allclose(kept.mean(0), torch.tensor(0.7, dtype=torch.float64), atol=0.01)
    correlation = torch.corrcoef(kept.T) - torch.eye(4)
    assert correlation.abs().max() < 0.02
    by_row = torch.zeros(200).index_add(0, csr.row_index, kept[:, 0].float())
    share = by_row / csr.row_ptr.diff()
    assert 0.03 < share.std() < 0.055  # a binomial of 120 has 0.042
