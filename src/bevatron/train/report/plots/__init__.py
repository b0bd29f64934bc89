"""Figures in one house style: curves, parity, bars, stacks, histograms, ranges, batch balance.

Every function returns a matplotlib figure without a window or global state;
`bevatron.train.report.page.Report` embeds it and `save` writes it. Colours are those of Okabe and
Ito, which colour-blind readers can tell apart; every axis has quantity and unit.
"""

from bevatron.train.report.plots.agreement import MOST_POINTS, bars, parity
from bevatron.train.report.plots.balance import batch_balance
from bevatron.train.report.plots.distributions import Counted, histogram, ranges
from bevatron.train.report.plots.lines import Curve, Panel, curves
from bevatron.train.report.plots.stacks import Stacks, stacks
from bevatron.train.report.plots.style import PALETTE, png, save

__all__ = [
    "MOST_POINTS",
    "PALETTE",
    "Counted",
    "Curve",
    "Panel",
    "Stacks",
    "bars",
    "batch_balance",
    "curves",
    "histogram",
    "parity",
    "png",
    "ranges",
    "save",
    "stacks",
]
