"""Draw one training sample: a crop at an interface in 3D, and its alignment with the coverage.

    python -m benchmarks.data.protein_pictures STRUCTURE ALIGNMENTS --components components.cif

Adds both pictures to the page of `benchmarks.data.proteins`.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from benchmarks.common.report import RESULTS, add_picture
from matplotlib.figure import Figure

from bevatron.data.proteins.alignments import Alignments
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.poses import open_poses
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.readers.proteins.alphabet import GAP
from bevatron.recipes.alphafold3.data import units_of
from bevatron.recipes.alphafold3.stores import POSES, open_complexes, prepare_complexes
from bevatron.recipes.proteins.searches import ALIGNMENTS
from bevatron.train.report.plots.style import FAINT, colours, new_axes
from bevatron.typing import Array, Arrays

SEED, TOKENS, ROWS = 1, 384, 1024


def drawn(files: list[Path], components: str) -> tuple[Arrays, Arrays]:
    """Prepare a complex; return it and a crop at the interface that is drawn most often."""
    with tempfile.TemporaryDirectory() as name:
        prepare_complexes(files, Path(name) / "store", components=components, workers=0)
        store = open_complexes(Path(name) / "store")
        units, weights = units_of(store, np.arange(1))
        between = np.flatnonzero(units[:, 2] > 0)
        chains = units[between[weights[between].argmax()], 1:].tolist()
        sources = Sources(open_poses(store.path / POSES), Alignments.open(store.path / ALIGNMENTS))
        sizes = SampleSizes(CropSizes(tokens=TOKENS, shares=(0.0, 0.0, 1.0)), ROWS)
        entry = {key: np.array(value) for key, value in store[0].items()}
        return entry, sample(store[0], SEED, sources, sizes, chains)


def crop_figure(entry: Arrays, crop: Arrays) -> Figure:
    """Draw the resolved atoms of the complex, those of the crop in the colours of their chains."""
    token = np.repeat(np.arange(len(entry["num_atoms"])), entry["num_atoms"])
    resolved = entry["resolved"].astype(np.bool_)
    whole = entry["position"][resolved]
    outside = entry["position"][resolved & ~np.isin(token, crop["token_index"])]
    chain = crop["asym_id"][crop["atom_to_token"]]
    names = np.unique(chain)
    with new_axes(7.6, 5.6, subplot_kw={"projection": "3d"}) as (figure, axes):
        ax = axes[0, 0]
        ax.scatter(*outside.T, s=1.5, color=FAINT, depthshade=False, label="outside the crop")
        for name, colour in zip(names, colours(len(names)), strict=True):
            shown = crop["position"][(chain == name) & crop["resolved"]]
            ax.scatter(*shown.T, s=5, color=colour, depthshade=True, label=f"crop, chain {name}")
        for axis in "xyz":
            getattr(ax, f"set_{axis}label")(f"{axis} (Å)", labelpad=8)
        ax.set_box_aspect(np.ptp(whole, axis=0))
        ax.legend(loc="upper left", bbox_to_anchor=(-0.32, 1.0), markerscale=2)
    return figure


def alignment_figure(msa: Array) -> Figure:
    """Draw the rows by identity with the first, and the share of rows that reach each token."""
    given = msa != GAP
    same = (msa == msa[0]) & given
    identity = same.sum(1) / np.maximum(given.sum(1), 1)
    order = np.argsort(-identity, kind="stable")
    shown = np.where(given, identity[:, None], np.nan)[order]
    with new_axes(7.4, 4.6) as (figure, axes):
        ax = axes[0, 0]
        image = ax.imshow(
            shown, aspect="auto", interpolation="nearest", cmap="viridis_r", vmin=0, vmax=1
        )
        figure.colorbar(image, ax=ax, label="identity with the first row", pad=0.11)
        ax.set(xlabel="token of the crop", ylabel="row")
        ax.grid(visible=False)
        cover = ax.twinx()
        cover.plot(given.mean(0), color="black", linewidth=1.2)
        cover.set(ylim=(0, 1.02), ylabel="coverage")
        cover.grid(visible=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--components", required=True)
    arguments = parser.parse_args()
    entry, crop = drawn(arguments.files, arguments.components)
    result = RESULTS / "data/proteins.json"
    add_picture(crop_figure(entry, crop), result, "crop")
    add_picture(alignment_figure(crop["msa"]), result, "alignment")


if __name__ == "__main__":
    main()
