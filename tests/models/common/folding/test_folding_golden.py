"""Shared modules of AlphaFold2 and 3 against values and gradients of the public implementations."""

import pytest

import folding_golden as golden
from bevatron.models.common.folding import (
    OuterProductMean,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)
from bevatron.models.common.folding import published_names as names


@pytest.mark.parametrize(
    ("file", "outgoing", "bias"),
    [
        ("alphafold2/tri_mul_out", True, True),
        ("alphafold2/tri_mul_in", False, True),
        ("alphafold3/tri_mul_in", False, False),
    ],
)
def test_triangle_multiplication_is_that_of_the_public_code(file, outgoing, bias, shared):
    data = golden.read(shared, file)
    hidden, width = data.of("w")["linear_a_p.weight"].shape
    module = TriangleMultiplication(width, hidden, outgoing=outgoing, bias=bias)
    golden.check(
        module,
        data,
        golden.published(module, names.TRIANGLE_MULTIPLICATION),
        lambda module, x: {"z": module(x["z"], x["pair_mask"].bool()) - x["z"]},
    )


@pytest.mark.parametrize(
    ("file", "starting", "bias"),
    [
        ("alphafold2/tri_att_start", True, True),
        ("alphafold2/tri_att_end", False, True),
        ("alphafold3/tri_att_end", False, False),
    ],
)
def test_triangle_attention_is_that_of_the_public_code(file, starting, bias, shared):
    data = golden.read(shared, file)
    num_heads, width = data.of("w")["linear.weight"].shape
    head_width = len(data.of("w")["mha.linear_q.weight"]) // num_heads
    module = TriangleAttention(width, num_heads, head_width, starting=starting, bias=bias)
    golden.check(
        module,
        data,
        golden.published(module, names.TRIANGLE_ATTENTION),
        lambda module, x: {"z": module(x["z"], x["pair_mask"].bool()) - x["z"]},
    )


@pytest.mark.parametrize(("file", "bias"), [("alphafold2", True), ("alphafold3", False)])
def test_the_outer_product_mean_is_that_of_the_public_code(file, bias, shared):
    data = golden.read(shared, f"{file}/outer_product_mean")
    weights = data.of("w")
    (hidden, width), pair = weights["linear_1.weight"].shape, len(weights["linear_out.weight"])
    module = OuterProductMean(width, hidden, pair, bias=bias)
    golden.check(
        module,
        data,
        golden.published(module, names.OUTER_PRODUCT_MEAN),
        lambda module, x: {"z": module(x["m"], x["msa_mask"].bool() if "msa_mask" in x else None)},
    )


@pytest.mark.parametrize(
    ("file", "gated", "table"),
    [
        ("alphafold3/transition", True, names.SWIGLU_TRANSITION),
        ("alphafold2/msa_transition", False, names.RELU_TRANSITION),
        ("alphafold2/pair_transition", False, names.RELU_TRANSITION),
    ],
)
def test_the_transition_is_that_of_the_public_code(file, gated, table, shared):
    data = golden.read(shared, file)
    hidden, width = data.of("w")[f"{table['up']}.weight"].shape
    module = Transition(width, hidden // width, gated=gated)
    (taken,), (given,) = data.of("gin"), data.of("out")
    golden.check(
        module,
        data,
        golden.published(module, table),
        lambda module, x: {given: module(x[taken]) - x[taken]},
    )


STORED_AS_FLOAT32 = 2e-6


@pytest.mark.parametrize("file", ["tri_mul_out", "tri_attn_start"])
def test_triangles_agree_with_three_public_implementations(file, shared):
    data = golden.read(shared, f"pair/{file}")
    if file == "tri_mul_out":
        table = names.TRIANGLE_MULTIPLICATION
        module = TriangleMultiplication(64, 64, outgoing=True)
    else:
        table = names.TRIANGLE_ATTENTION
        module = TriangleAttention(64, 4, 16, starting=True)
        data.arrays["cmp__y"] = data.arrays["cmp__y"][..., 0]
    golden.check(
        module,
        data,
        golden.published(module, table),
        lambda module, x: {"y": module(x["z"], x["mask"].bool()) - x["z"]},
        tolerance=STORED_AS_FLOAT32,
    )
