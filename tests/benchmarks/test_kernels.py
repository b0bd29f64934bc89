"""The cases of the kernels' benchmark, small and interpreted: checked as there before timing."""

import argparse
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benchmarks.common.report import write_result
from benchmarks.kernels import admission, host_time, pages, peers_folding, peers_pair, run
from benchmarks.kernels.cases import OPERATORS, Setup, Work, cases_of, leaves_of
from benchmarks.kernels.cases_equivariant import EQUIVARIANT, PASSES, crystals
from benchmarks.kernels.cases_graph import GRAPH
from benchmarks.kernels.cases_optim import OPTIMIZER
from benchmarks.kernels.cases_pair import PAIR

from bevatron import kernels

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small(op, dtype=torch.float32):
    return list(cases_of(op, Setup(dtype, DEVICE, tiny=True)))


@pytest.mark.parametrize("op", ["radial_network", "edge_vectors", "scatter_sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cases_pass_their_check_and_every_pass_runs(op, dtype):
    for case in small(op, dtype):
        run.checked(case)
        inputs = case.draw(0)
        with kernels.use("triton"):
            result, first, second = (case.step(which).run() for which in PASSES)
        assert result.dtype == dtype
        assert [g.shape for g in first] == [result.shape, *(v.shape for v in inputs.values())]
        assert len(second) == 1 + len(inputs)
        assert second[0].shape == result.shape
        moved = [case.least[which].bytes for which in PASSES]
        assert moved == sorted(set(moved))


@pytest.mark.parametrize("op", ["layer_norm", "add_dropped", "qkvg", "gatv2"])
def test_cases_of_other_families_pass_their_check(op):
    for case in small(op):
        launches = kernels.launches()
        assert run.checked(case)
        assert kernels.launches() != launches


def test_a_mask_is_drawn_in_the_type_it_is_used_in_and_gets_no_gradient():
    for case in small("add_dropped", torch.bfloat16):
        inputs = case.draw(0)
        assert inputs["mask"].dtype == torch.bfloat16
        assert list(leaves_of(inputs)) == [name for name in inputs if name != "mask"]
        assert not inputs["mask"].requires_grad
        scaled = admission.scaled(2.0)(inputs)
        assert torch.equal(scaled["mask"], inputs["mask"])
        assert torch.equal(scaled["x"], 2 * inputs["x"])


def test_a_peer_of_a_graph_operator_gives_the_same():
    case = small("gat")[0]
    inputs = case.draw(0)
    with kernels.use("reference"):
        ours = case.ours(**inputs)
    theirs = case.peers["cuSPARSE GAT"](**inputs)
    assert theirs.shape == ours.shape
    torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize("op", ["transition", "conditioned_transition"])
def test_weights_may_be_joined_before_a_matmul(op):
    (case,) = small(op, torch.float64)
    inputs = case.draw(0)
    joined = getattr(peers_pair, f"joined_{op}")
    torch.testing.assert_close(joined(**inputs), case.plain(**inputs))
    assert "compile, joined weights" in case.peers


def test_a_kernel_that_is_wrong_is_not_timed():
    (case,) = small("edge_vectors")

    def wrong(positions):
        return case.ours(positions) * (1.0 if positions.dtype == torch.float64 else 1.0001)

    with pytest.raises(AssertionError, match="result: error"):
        run.checked(replace(case, ours=wrong))


def test_a_kernel_that_is_worse_than_plain_pytorch_is_not_timed():
    (case,) = small("swiglu")

    def wrong(gate, value):
        return case.ours(gate, value) * 1.001

    with pytest.raises(SystemExit, match="swiglu tiny: the error of result is 1"):
        run.checked(replace(case, ours=wrong))


def test_training_takes_first_derivatives_as_forces_are_taken(monkeypatch):
    """Else the derivatives of the weights' gradients were timed, which no step needs."""
    from bevatron.kernels.equivariant.radial_network import triton as module

    (case,) = small("radial_network")
    monkeypatch.setattr(module, "plain", lambda *_: pytest.fail("differentiated once more"))
    with kernels.use("triton"):
        case.step("training").run()


def test_bytes_are_those_of_the_operators_pages():
    (vectors,) = small("edge_vectors")
    atoms, edges, cell = crystals(Setup(torch.float32, DEVICE, tiny=True))
    structures = atoms // cell
    forward = 40 * edges + 20 * atoms + 36 * structures
    sums, again = 20 * edges + 28 * atoms, 28 * edges + 12 * atoms
    assert [vectors.least[which].bytes for which in PASSES] == [
        forward,
        forward + sums,
        forward + sums + again,
    ]
    energies = small("scatter_sum", torch.float64)[0]
    assert energies.least["forward"].bytes == 8 * atoms + 8 * structures + 8 * (structures + 1)


@pytest.mark.parametrize("op", OPERATORS)
def test_small_cases_have_the_passes_of_usual_ones_and_run_by_the_reference(op):
    found = small(op)
    assert found
    for case in found:
        assert set(case.least) <= {"forward", "backward", "training", "forward+backward", "step"}
        with kernels.use("reference"):
            for which in case.least:
                step = case.step(which)
                for call in filter(None, (step.before, step.run)):
                    call()


def test_cases_are_chosen_by_name_and_group():
    setup = Setup(torch.bfloat16, "meta")
    assert len(list(cases_of("layer_norm", setup))) == 3
    wide = [case.name for case in cases_of("layer_norm", setup, ("rows",))]
    assert {"N 384, 1 of 8, 128 wide", "32768 rows, 2048 wide"} < set(wide)
    (one,) = cases_of("triangle_multiply", setup, ("N 250, C 64",))
    assert not one.usual
    assert len(list(cases_of("pair_attention", setup, ("other",)))) == 16


def test_heads_may_be_contiguous_for_ours_and_for_peers():
    setup = Setup(torch.float32, DEVICE, tiny=True)
    usual = small("pair_attention")
    first = list(cases_of("pair_attention", setup, ("heads first",)))
    assert [case.name for case in first] == [f"{case.name}, heads first" for case in usual]
    for case, turned in zip(usual, first, strict=True):
        run.checked(turned)
        inputs, given = case.draw(0), turned.draw(0)
        expected = case.plain(**inputs).transpose(2, 3)
        assert given["q"].is_contiguous()
        assert given["q"].shape == expected.shape
        for operator in (turned.ours, turned.plain, turned.peers["SDPA"]):
            torch.testing.assert_close(operator(**given), expected)


def test_results_are_named_by_operators_and_cases():
    assert run.result_name(PAIR, ["qkvg"], []) == "kernels/qkvg"
    assert run.result_name(PAIR, ["layer_norm", "swiglu"], ["rows"]) == (
        "kernels/layer_norm-swiglu-rows"
    )
    assert run.result_name(PAIR, ["pair_attention"], ["other"]) == "kernels/pair_attention-shapes"
    assert run.result_name(GRAPH, ["gat"], ["17-88M"]) == "graph/kernels"
    every = run.operators(["equivariant", "optim"])
    assert run.result_name(EQUIVARIANT, every["equivariant"], []) == "kernels/mace"
    assert run.result_name(OPTIMIZER, every["optim"], []) == "kernels/optimizer"


@pytest.mark.parametrize("name", [*pages.PAGES])
def test_every_page_has_arguments_that_choose_cases(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "--op", *pages.PAGES[name]])
    options = run.arguments()
    assert all([*cases_of(op, Setup(torch.bfloat16), options.cases)] for op in options.op)


def test_pages_go_to_the_next_free_gpu_and_what_is_measured_is_kept(tmp_path, monkeypatch):
    ran = []

    def measured(command, *, env, timeout, **_):
        """Measure transitions too slowly and norms wrongly, and leave half of their pages."""
        name = command[command.index("--name") + 1]
        ran.append((env["CUDA_VISIBLE_DEVICES"], name))
        on = {"hardware": "nvidia-h200", "versions": {"torch": "2"}}
        rows = [{"case": name, "ms": 1.0}]
        folder = Path(command[command.index("--out") + 1])
        write_result(name, rows, "Notes.", folder=folder, measured_on=on)
        if name.endswith("norm_linear"):
            return Mock(returncode=1)
        if name.endswith("transition"):
            raise subprocess.TimeoutExpired(command, timeout)
        return Mock(returncode=0)

    monkeypatch.setattr(pages.subprocess, "run", measured)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["pages", *out])
    with pytest.raises(SystemExit, match=r"not measured: .*layer_norm-layer_norm_linear"):
        pages.main()
    assert sorted(name for _, name in ran) == sorted(f"kernels/{name}" for name in pages.PAGES)
    assert {gpu for gpu, _ in ran} <= {"2", "5"}

    ran.clear()
    with pytest.raises(SystemExit):
        pages.main()  # what failed is tried again, and nothing else
    assert sorted(name for _, name in ran) == [
        "kernels/layer_norm-layer_norm_linear",
        "kernels/transition",
    ]

    ran.clear()
    monkeypatch.setattr(sys, "argv", ["pages", *out, "--seconds", "1"])
    with pytest.raises(SystemExit, match="not measured"):
        pages.main()
    assert not ran

    collected = ["--collect", out[1], "--results", str(tmp_path / "results"), "--note", "More."]
    monkeypatch.setattr(sys, "argv", ["pages", *collected])
    pages.main()
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("results/*/*.json")}
    assert set(found) == set(pages.PAGES) - {"transition", "layer_norm-layer_norm_linear"}
    page = found["qkvg"]
    assert (page["hardware"], page["notes"]) == ("nvidia-h200", "Notes. More.")
    assert page["rows"] == [{"case": "kernels/qkvg", "ms": 1.0}]


def attention_peers():
    for op in ("pair_attention", "window_attention"):
        for case in OPERATORS[op].make(Setup(torch.float32, "cpu", tiny=True)):
            for peer in sorted({"flex_attention", "SDPA", "pair_attention"} & set(case.peers)):
                yield pytest.param(case, peer, id=f"{op}, {case.name}, {peer}")


@pytest.mark.parametrize(("case", "peer"), [*attention_peers()])
def test_a_peer_computes_the_same_and_pays_for_no_index(monkeypatch, case, peer):
    """The gradient of an index is a fill and a copy, which slowed flex_attention by a quarter."""
    monkeypatch.setattr(peers_pair, "compiled", lambda function: function)
    monkeypatch.setattr(peers_folding, "compiled", lambda function: function)
    inputs = case.draw(0)
    with torch.no_grad():
        torch.testing.assert_close(case.peers[peer](**inputs), case.plain(**inputs))
    if peer != "flex_attention":  # which has no gradients on a CPU
        for leaf in leaves_of(inputs).values():
            leaf.requires_grad_()
        assert "SelectBackward0" not in nodes(case.peers[peer](**inputs).grad_fn)


def nodes(function):
    """Return the names of what gradients pass through."""
    found, left = set(), [function]
    while left:
        if (one := left.pop()) is not None:
            found.add(one.name())
            left += [before for before, _ in one.next_functions]
    return found


def columns(monkeypatch, family, found, peers=None):
    """Return the rows of a page of small cases, with times that are made up."""
    monkeypatch.setattr(run, "launched", lambda *_, **__: {"MiB": 1, "eager ms": 2.0})
    monkeypatch.setattr(run, "replay_of", lambda step: step)
    monkeypatch.setattr(run.timing, "in_turn", lambda calls, **_: [(1.0, 1.7) for _ in calls])
    monkeypatch.setattr(run, "kept_mib", lambda *_: 0.0)
    options = argparse.Namespace(peers=peers, no_reference=False)
    rows = []
    for case in found:
        quick = replace(case, floor=case.floor and (lambda _: 0.5))
        rows += run.measured(quick, family, options, run.Rates(1e12, 1e12), {})
    return family.table(rows)


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch):
    (case, *_) = small("swiglu")
    peers = {"same": case.plain, "twice": lambda **inputs: 2 * case.plain(**inputs)}
    rows = columns(monkeypatch, PAIR, [replace(case, peers=peers)], ["same", "twice"])
    ours, same, twice = rows
    assert "off by" not in ours
    assert same["off by"] < 1e-6
    assert "ms" not in twice
    assert twice["note"] == "failed: off by 1 of ours"


@pytest.mark.parametrize(
    ("family", "op", "peers", "wanted"),
    [
        (
            PAIR,
            "swiglu",
            ["eager"],
            {"op", "case", "who", "ms", "GHz", "eager ms", "MiB", "floor ms"},
        ),
        (GRAPH, "gat", None, {"graph", "k", "op", "forward ms", "forward+backward ms"}),
        (
            *(OPTIMIZER, "fused_adam_ema", []),
            {"model", "captured ms", "launched ms", "torch captured ms", "floor ms"},
        ),
    ],
)
def test_rows_have_the_columns_that_pages_are_made_of(monkeypatch, family, op, peers, wanted):
    found = columns(monkeypatch, family, small(op), peers)
    assert found
    assert all(wanted <= set(row) for row in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_implementations_take_turns_on_a_gpu():
    options = argparse.Namespace(peers=["eager"], no_reference=True)
    setup = Setup(torch.bfloat16, "cuda", tiny=True)
    for case in cases_of("transition", setup):
        rows = [*run.measured(case, PAIR, options, run.Rates(1e12, 1e12), {"worst error": 1.0})]
        assert [row["who"] for row in rows] == ["bevatron", "eager"]
        assert all(row["ms"] > 0 and 0.1 < row["GHz"] < 3 for row in rows)
        assert [row.get("worst error") for row in rows] == [1.0, None]


@pytest.mark.parametrize(("captured", "note"), [(0, ""), (1, " beside the replays before")])
def test_a_peer_without_memory_tells_what_else_was_held(monkeypatch, captured, note):
    """Alone it might have had enough: replays that take turns are held together."""
    calls = iter(range(3))

    def replay(_):
        if next(calls) >= captured:
            raise torch.OutOfMemoryError
        return lambda: None

    monkeypatch.setattr(run, "launched_and_captured", lambda *_: ({}, replay(_)))
    monkeypatch.setattr(run.timing, "in_turn", lambda calls, **_: [(1.0, 1.7) for _ in calls])
    options = argparse.Namespace(peers=["eager", "compile"], no_reference=True)
    rows = [*run.measured(small("swiglu")[0], PAIR, options, run.Rates(1e12, 1e12), {})]
    assert [row.get("note") for row in rows[captured:]] == ["out of memory" + note] * (3 - captured)


def test_times_of_several_tiles_are_in_rows_of_their_own():
    measured = [
        {"op": "gat", "who": "bevatron", "graph": "g", "nnz": 1, "k": 16, "tile": tile, "pass": way}
        for tile in ("512x32x1", "1024x32x1")
        for way in ("forward", "forward+backward")
    ]
    found = GRAPH.table([{**row, "ms": float(i)} for i, row in enumerate(measured)])
    assert [(row["tile"], row["forward+backward ms"]) for row in found] == [
        ("512x32x1", 1.0),
        ("1024x32x1", 3.0),
    ]


def test_a_peer_without_memory_for_a_forward_pass_has_a_row():
    graph = {"graph": "g", "nnz": 1, "k": 128, "op": "agnn", "floor ms": 2.0}
    rows = [
        {**graph, "who": "bevatron", "pass": "forward", "ms": 3.0},
        {**graph, "who": "PyG AGNNConv", "pass": "forward", "note": "out of memory"},
    ]
    ours, peer = GRAPH.table(rows)
    assert ours["forward / floor"] == 1.5
    assert (peer["op"], peer["forward ms"], peer["note"]) == ("PyG AGNNConv", "", "out of memory")


def test_times_of_the_reference_are_in_the_row_of_the_operator(monkeypatch):
    rows = columns(monkeypatch, EQUIVARIANT, small("silu"))
    assert [row["pass"] for row in rows] == list(PASSES)
    assert all({"op", "case", "ms", "reference ms", "peak MiB", "ratio"} <= set(r) for r in rows)


def test_the_floor_is_the_longest_of_what_the_device_must_do():
    assert Work(2e9, 1e9).floor_ms(1e12, 1e12) == 2.0
    assert Work(2e9, 4e9).floor_ms(1e12, 1e12) == 4.0


def test_what_fails_its_check_is_told_and_not_timed(monkeypatch, tmp_path):
    (case,) = small("silu")

    def fail(_):
        raise SystemExit("silu 64: wrong")

    monkeypatch.setattr(run, "cases_of", lambda *_: [replace(case, check=fail)])
    for rate in ("copy_rate", "matmul_rate"):
        monkeypatch.setattr(run.timing, rate, lambda *_: 1e12)
    written = []
    monkeypatch.setattr(
        run.report, "write_result", lambda name, rows, *_, **__: written.append(rows)
    )
    options = argparse.Namespace(
        name=None, dtype=None, tiles=None, cases=(), checked=False, out=tmp_path, peers=None
    )
    assert run.run_family(EQUIVARIANT, ["silu"], options) == ["silu 64: wrong"]
    ((row,),) = written
    assert row["note"] == "refused: silu 64: wrong"
    assert "ms" not in row


def test_a_dry_run_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry-run", "--op", "silu"])
    run.main()
    assert capsys.readouterr().out.startswith("silu 64 float32 forward backward training")


@pytest.mark.parametrize("op", list(admission.CASES))
def test_every_kind_of_input_is_admitted_by_the_reference(op):
    named = cases_of(op, Setup(torch.bfloat16, DEVICE), admission.CASES[op])
    assert sorted(case.name for case in named) == sorted(admission.CASES[op])
    case = small(op)[0]
    with kernels.use("reference"):
        rows = [admission.accuracy(case, kind) for kind in admission.KINDS]
    assert all(row is None or row["admitted"] for row in rows)
    assert sum(row is None for row in rows) == (0 if "mask" in case.draw(0) else 2)
    assert all(row is None or math.isfinite(row["plain's"]) for row in rows)


def test_the_last_case_of_an_operator_is_soaked_and_what_has_other_kernels(monkeypatch):
    soaked = []
    monkeypatch.setattr(admission, "accuracy", lambda case, kind: None)
    monkeypatch.setattr(admission, "speed", lambda case: {"admitted": True})
    monkeypatch.setattr(
        admission, "soak", lambda case, _: soaked.append(case.name) or {"admitted": True}
    )
    monkeypatch.setattr(admission, "write_result", lambda *_, **__: None)
    ops = ["window_attention", "layer_norm_linear", "add_dropped", "triangle_multiply"]
    monkeypatch.setattr(sys, "argv", ["admission.py", "--op", *ops])
    admission.main()
    of_triangles = ["N 256, C 128", "N 64, C 128"]
    assert soaked[:3] == ["4 x 1000 atoms", "147456 x 128 to 4", "N 64, with its layer"]
    assert sorted(soaked[3:]) == of_triangles


def test_a_call_that_gives_other_bits_is_counted(monkeypatch):
    monkeypatch.setattr(admission.timing, "captured", lambda call: call)
    case, calls = small("layer_norm")[0], iter(range(100))

    def other_once(**inputs):
        return case.ours(**inputs) + (next(calls) == 4)

    with kernels.use("reference"):
        assert admission.soak(case, 3)["admitted"]
        row = admission.soak(replace(case, ours=other_once), 5)
    assert row["differing"] == 1
    assert not row["admitted"]


@pytest.mark.parametrize(("off", "is_admitted"), [(1e-6, True), (1e-3, False)])
def test_a_gradient_that_is_exactly_zero_is_measured_by_that_of_other_inputs(off, is_admitted):
    case, calls = small("pair_attention")[0], iter(range(100))

    def almost_zero(bias, **inputs):
        result = case.ours(bias=bias, **inputs)
        # Of one key the softmax has no gradient; drawn, exact, then ours.
        return result + (off * bias.sum() if next(calls) == 3 else 0.0)

    with kernels.use("reference"):
        row = admission.accuracy(replace(case, ours=almost_zero), "one key")
    assert (row["worst"], row["admitted"]) == ("bias", is_admitted)


def test_more_draws_decide_where_one_leaves_a_weight_in_doubt():
    case, calls = small("layer_norm")[0], iter(range(100))

    def unlucky_once(weight, **inputs):
        result = case.ours(weight=weight, **inputs)
        return result + (0.01 * weight.sum() if next(calls) == 3 else 0.0)  # ours, of one draw

    with kernels.use("reference"):
        row = admission.accuracy(replace(case, ours=unlucky_once), "normal")
    assert next(calls) > 30
    assert row["worst"] != "weight"


def test_a_result_that_is_off_is_not_admitted():
    case = small("triangle_multiply")[0]

    # One draw, then those that decide.
    draw = ("a gradient is drawn", "exact", "ours", "plain")
    calls = itertools.chain((draw[0], "usual", *draw[1:]), itertools.cycle(draw))

    def off(**inputs):
        return case.ours(**inputs) * (1.01 if next(calls) == "ours" else 1.0)

    with kernels.use("reference"):
        row = admission.accuracy(replace(case, ours=off), "one key")
    assert not row["admitted"]


@pytest.mark.parametrize("op", list(host_time.CASES))
def test_host_time_is_taken_of_one_and_of_many(op):
    named = cases_of(op, Setup(torch.bfloat16, DEVICE), host_time.CASES[op])
    assert [case.name for case in named] == list(host_time.CASES[op])
    case = small(op)[0]
    calls = []

    def ours(**inputs):
        calls.append(inputs)
        return case.ours(**inputs)

    with kernels.use("reference"):
        timed = host_time.Timed(case, "bevatron", ours)
        timed.row["us, one thread"] = 0.5  # an earlier pass was faster
        timed.measure(rounds=1, calls=1, wait=lambda: None)
    assert len(calls) == 2 * (1 + host_time.IN_A_ROW + 1)
    found = {key: value for key, value in timed.row.items() if key.startswith("us")}
    assert found.pop("us, one thread") == 0.5
    assert len(found) == 2
    assert all(value > 0 for value in found.values())
