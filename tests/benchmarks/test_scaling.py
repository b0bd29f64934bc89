"""What the benchmarks compute from measured rows; the measuring itself needs GPUs."""

from benchmarks.mace import scaling


def row(gpus, rate, **more):
    plain = {"scaling": "strong", "case": "balanced:auto", "copies": 1, "ms/step": 20.0}
    return {**plain, "GPUs": gpus, "atoms/s": rate, "settled ms": 16.0, "median": 10.0, **more}


def test_efficiencies_by_all_settled_and_median_steps():
    one = row(1, 100, **{"ms/step": 10.0, "settled ms": 10.0})
    two = row(2, 100)
    scaling.with_ratios([one, two])
    assert two["efficiency %"] == 50.0
    assert two["efficiency settled %"] == 62.5
    assert two["efficiency by medians %"] == 100.0


def test_one_copy_on_one_gpu_begins_weak_scaling_too():
    rows = [row(1, 100), row(1, 90, case="algorithm1:auto"), row(2, 180, scaling="weak", copies=2)]
    found = scaling.weak_on_one(rows)
    assert found == [{**rows[0], "scaling": "weak"}]
    assert not scaling.weak_on_one([*rows, *found])


def test_pictures_do_not_join_runs_of_different_code():
    plain = {"case": "fixed_count:reference"}
    rows = [row(1, 100), row(4, 390), row(4, 20, **plain), row(1, 6, **plain)]
    older = [row(8, 80, measured="h200 2026-11-20"), row(8, 9, measured="then", **plain)]
    figures = scaling.pictures([*rows, *older])
    assert "4 GPUs" in figures["ablation"].axes[0].get_xlabel()
    lines = {line.get_label(): line for line in figures["strong"].axes[0].get_lines()}
    assert max(lines["balanced, fast kernels"].get_xdata()) == 4


def test_the_first_steps_of_every_epoch_have_not_settled():
    late = scaling.settled_steps([1] * 12 + [2] * 11)
    assert late.nonzero()[0].tolist() == [10, 11, 22]
    assert scaling.settled_steps([1] * 5).all()
