"""The report is one file that needs nothing else, and figures say what they show."""

import base64
import errno
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.text import Text

from bevatron.errors import BevatronError
from bevatron.train.report import plots
from bevatron.train.report.page import Report, number
from bevatron.train.report.plots import style

RNG = np.random.default_rng(0)


class Outline(HTMLParser):
    """Checks that tags close in order and gathers what refers elsewhere."""

    void = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href"}]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def figure():
    return plots.histogram({"a": [1, 2, 2, 3]}, "atoms")


def test_report_refers_to_nothing_outside(tmp_path):
    report = Report("Water & co", "a run", figures=tmp_path / "plots")
    report.section("First").text("1 < 2").notes(["resumed on other ranks at epoch 3"])
    report.table(["what", "value"], [["x", 1.0], ["y", None]]).figure(figure(), "sizes", "sizes")
    report.section("Second").config({"optim": {"lr": 0.01}}).versions()
    path = report.write(tmp_path / "new" / "report.html")
    page = path.read_text()
    outline = Outline()
    outline.feed(page)
    assert not outline.open
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in outline.links)
    assert "script" not in outline.tags
    assert "url(" not in page
    for words in ("Water &amp; co", "1 &lt; 2", "resumed on other ranks at epoch 3", "lr: 0.01"):
        assert words in page


def test_embedded_figure_is_the_png_in_the_folder(tmp_path):
    page = Report("x", figures=tmp_path).figure(figure(), name="sizes").html()
    data = re.search(r"base64,([^\"]+)\"", page).group(1)
    assert base64.b64decode(data) == (tmp_path / "sizes.png").read_bytes()
    assert base64.b64decode(data).startswith(b"\x89PNG")


def test_text_columns_stand_left_and_numbers_right():
    page = Report("x").table(["group", "n"], [["a", 3], ["b", None]]).html()
    assert '<th>group</th><th class="number">n</th>' in page
    assert '<td>a</td><td class="number">3</td>' in page
    page = Report("x").table(["file", "clash"], [["a.cif", False]]).html()
    assert "<th>clash</th>" in page
    assert "<td>no</td>" in page


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (3, "3"),
        (21.345, "21.34"),
        (-1500.2, "-1,500"),
        (1e-9, "1e-09"),
        (True, "yes"),
    ],
)
def test_numbers_are_rounded_to_be_read(value, words):
    assert number(value) == words


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    path = Report("old").write(tmp_path / "report.html")
    before = path.read_text()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bevatron.files.os.fsync", full)
    with pytest.raises(BevatronError, match="the disk is full"):
        Report("new").write(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def labels(figure):
    return [(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes]


def test_every_axis_of_a_parity_plot_names_quantity_and_unit():
    values = RNG.normal(size=50)
    assert labels(plots.parity(values, values, "energy", "eV"))[:2] == [
        ("reference energy (eV)", "predicted energy (eV)"),
        ("predicted - reference (eV)", "share of values"),
    ]


def test_parity_leaves_out_missing_labels_and_reports_the_right_errors():
    reference = np.array([0.0, 1.0, np.nan, 2.0])
    figure = plots.parity(reference, [0.5, 1.0, 7.0, 1.0], "energy", "eV", ["a", "a", "b", "b"])
    words = figure.axes[1].texts[0].get_text()
    assert re.findall(r"(\S+)\s+([\d.]+)", words) == [
        ("MAE", "0.5"), ("RMSE", "0.645"), ("max", "1"), ("n", "3"),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 10, 5000])
def test_parity_draws_any_number_of_points(count, tmp_path):
    values = RNG.normal(size=count)
    figure = plots.parity(values, values + 0.1, "force component", "eV/Å")
    assert plots.save(figure, tmp_path / "a" / "parity.png").stat().st_size > 5000


def panel_of(number, first=0):
    return plots.Panel(
        "Rate",
        "atoms/s",
        [plots.Curve(f"case {i}", [1, 2], [i + 1, i + 2]) for i in range(first, first + number)],
    )


def names(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_names_stand_once_below_the_panels_where_these_agree_on_them():
    figure = plots.curves([panel_of(6), panel_of(5), panel_of(1)])
    assert [names(legend) for legend in figure.legends] == [[f"case {i}" for i in range(6)]]
    assert not any(axes.get_legend() for axes in figure.axes)
    # One name would have two colours in one legend; the only curve of a panel needs no name.
    apart = plots.curves([panel_of(6), panel_of(7, first=2), panel_of(1)])
    assert not apart.legends
    assert [len(names(axes.get_legend())) for axes in apart.axes[:2]] == [6, 7]
    assert apart.axes[2].get_legend() is None
    alone = plots.curves([panel_of(1)])
    assert not alone.legends
    assert alone.axes[0].get_legend() is None


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.curves([panel_of(3), panel_of(3)]),
        lambda: plots.curves([panel_of(6), panel_of(3, first=1)]),
        lambda: plots.histogram({name: RNG.normal(size=50) for name in "abc"}, "energy (eV)"),
        lambda: plots.batch_balance({name: RNG.uniform(size=(9, 4)) for name in ("a", "b")}),
        lambda: plots.stacks([plots.Stacks("GPU", "share", ["0"], {"a": [0.9], "b": [0.1]})], 1),
    ],
    ids=["common", "apart", "histogram", "balance", "stacks"],
)
def test_legends_lie_on_no_axes_and_within_the_figure(draw):
    figure = draw()
    figure.draw_without_rendering()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    boxes = [legend.get_window_extent() for legend in legends if legend is not None]
    assert boxes
    for box in boxes:
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
        below = [axes.xaxis.get_label().get_window_extent() for axes in figure.axes]
        assert not any(box.overlaps(label) for label in below)
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0


def test_bars_that_count_have_whole_ticks():
    (ax,) = plots.bars(["protein", "RNA"], {"chains": [19, 1]}, "chains").axes
    assert (ax.get_xticks() % 1 == 0).all()


def test_the_figures_of_errors_stand_above_the_bars():
    errors = np.repeat([-0.3, 0.0, 0.3], [3, 10, 80])  # the highest bar is where they stand
    figure = plots.parity(np.zeros(93), errors, "energy", "eV")
    figure.draw_without_rendering()
    right = figure.axes[1]
    words = right.texts[0].get_window_extent()
    assert not any(words.overlaps(bar.get_window_extent()) for bar in right.patches)


def test_curves_leave_out_missing_points_and_turn_linear_without_a_logarithm():
    positive = plots.Panel("Loss", "loss", [plots.Curve("a", [1, 2, 3], [1.0, np.nan, 0.1])])
    negative = plots.Panel("Loss", "loss", [plots.Curve("a", [1, 2], [1.0, -0.1])])
    empty = plots.Panel("Nothing", "loss", [])
    figure = plots.curves([positive, negative, empty], events=[(2, "stage two")])
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "linear", "linear"]
    assert list(figure.axes[0].lines[0].get_xdata()) == [1, 3]
    assert figure.axes[2].texts[0].get_text() == "no values"


def test_batch_balance_says_what_the_slowest_rank_costs():
    even = np.full((5, 4), 100.0)
    uneven = even.copy()
    uneven[:, 0] = 200.0
    figure = plots.batch_balance({"even": even, "uneven": uneven}, capacity=200)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[0] == "even: 5 steps, slowest rank 0.0 % over the mean, fill 50.0 %"
    assert titles[1] == "uneven: 5 steps, slowest rank 60.0 % over the mean, fill 62.5 %"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.bars(["a", "b"], {"MAE": [1.0, np.nan], "RMSE": [2.0, 3.0]}, "error (eV)"),
        lambda: plots.bars([], {}, "error (eV)"),
        lambda: plots.bars(["a"], {"x": [1.0]}, "error", reference=(2.0, "all")),
        lambda: plots.histogram({"a": np.ones(10), "b": []}, "atoms"),
        lambda: plots.histogram({}, "atoms"),
        lambda: plots.histogram({"a": np.geomspace(1, 1e5, 50)}, "edges"),
        lambda: plots.ranges({"a.xyz": [1, 2, 3], "b.xyz": []}, "neighbours"),
        lambda: plots.batch_balance({"one": [[3.0]], "idle": [[0.0, 0.0]]}),
    ],
)
def test_figures_draw_without_warnings(draw, recwarn):
    assert draw().axes[0].get_xlabel()
    assert not recwarn.list


def test_letters_that_the_font_lacks_are_drawn_without_warnings(recwarn):
    assert style.png(plots.histogram({"水.xyz": np.ones(10), "b": np.ones(5)}, "原子"))
    assert not recwarn.list


NAME = "a$\\frac$b\udcff"
"""That of a file: a formula that is none, and a byte outside UTF-8."""
SHOWN = r"a\$\frac\$b\udcff"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.bars([NAME], {NAME: [1.0]}, NAME, NAME),
        lambda: plots.histogram({NAME: np.ones(10)}, NAME),
        lambda: plots.ranges({NAME: [1, 2, 3]}, NAME),
        lambda: plots.parity(np.zeros(93), np.ones(93), NAME, NAME),
        lambda: plots.curves([plots.Panel(NAME, NAME, [plots.Curve(NAME, [1, 2], [1.0, 0.1])])]),
        lambda: plots.batch_balance({NAME: [[3.0]]}),
    ],
)
def test_names_are_drawn_as_they_are_written(draw):
    figure = draw()
    for _ in range(2):  # what is escaped stays so
        style.png(figure)
        shown = [text.get_text() for text in figure.findobj(Text)]
        assert any(SHOWN in text for text in shown)
        assert not any(r"\\" in text for text in shown)


EVENTS = {
    "at one place": [(4, "stage two"), (4, "resumed"), (5, "resumed"), (5, "resumed")],
    "side by side": [(k / 4 + 1, "resumed") for k in range(17)],
    "at the right edge": [(5, "packed again after a resume")],
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("logarithmic", [True, False])
def test_labels_of_events_hide_neither_each_other_nor_the_curves(name, logarithmic):
    line = plots.Curve("", [1, 2, 3, 4, 5], [45.0, 44.3, 43.6, 44.9, 45.0])
    panel = plots.Panel("Loss", "loss", [line], logarithmic=logarithmic)
    figure = plots.curves([panel] * 3, events=EVENTS[name])
    plots.png(figure)
    ax = figure.axes[0]
    boxes = [text.get_window_extent() for text in ax.texts]
    assert boxes
    inside = ax.get_window_extent()
    drawn = ax.lines[0].get_window_extent()
    for place, box in enumerate(boxes):
        assert inside.x0 - 1 <= box.x0
        assert box.x1 <= inside.x1 + 1
        assert not box.overlaps(drawn)
        assert not any(box.overlaps(other) for other in boxes[:place])


def test_ticks_of_small_numbers_do_not_crowd():
    values = np.linspace(-0.029, 0.0225, 30)
    figure = plots.parity(values, values, "stress component", "eV/Å³")
    plots.png(figure)
    left = figure.axes[0]
    boxes = [label.get_window_extent() for label in left.get_xticklabels() if label.get_text()]
    gaps = [after.x0 - before.x1 for before, after in pairwise(boxes)]
    assert min(gaps) > 0.4 * max(box.width for box in boxes)


def test_a_lone_point_has_one_tick():
    figure = plots.curves([plots.Panel("lDDT", "lDDT", [plots.Curve("", [10], [0.5])])], "step")
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [10]


def test_times_of_seconds_are_written_out_beside_their_bars():
    figure = plots.stacks(
        [plots.Stacks("Step", "ms", ["now", "then"], {"ms": [1116.51, 85.71]})], 1
    )
    assert [text.get_text().strip() for text in figure.axes[0].texts] == ["1,117", "85.7"]
