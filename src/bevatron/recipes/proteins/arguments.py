"""Arguments shared by the commands of both protein systems, with their help."""

from pathlib import Path
from typing import Annotated

import tyro

from bevatron.recipes.arguments import option, positional


def recognises(path: Path) -> bool:
    """Whether a path looks like structures or alignments, or a folder of them."""
    from bevatron.data.readers.proteins.folders import is_protein_file

    return is_protein_file(path)


ProteinFiles = Annotated[
    tuple[Path, ...],
    tyro.conf.Positional,
    positional(
        "FILE ...",
        "Structures (.cif, .bcif, .pdb), alignments (.a3m, .sto, .afa) and template hits (.hhr, "
        ".m8), or folders of them. Alignments may also be OpenFold's alignment_db.index, hits "
        "hmmsearch's .sto; all may be .gz, .bz2, .xz or .zst, in tars, and in folders at any "
        "depth. An alignment is used for every chain of its first sequence; templates come from "
        "the structures.",
    ),
]
Strict = Annotated[bool, option("Stop at the first file that cannot be used.")]
LowestPlddt = Annotated[
    float | None,
    option(
        "For predicted structures: residues whose pLDDT (the B-factor) is not above it count as "
        "unresolved; 50 in AlphaFold2's self-distillation."
    ),
]
ReleasedBefore = Annotated[
    str | None,
    option(
        "Leave out structures that were not released before a day, such as 2021-09-30, by the "
        "dates in their files, else in OpenFold's mmcif_cache.json or chain_data_cache.json."
    ),
]
ReleasedFrom = Annotated[
    str | None, option("Leave out structures that were released before a day, as for a test set.")
]
Clusters = Annotated[
    Path | None,
    option(
        "File of protein clusters, which are drawn with equal weight: a line of members per "
        "cluster, such as 4HHB_A, or mmseqs2's pairs. Without it, clusters at 40 % identity are "
        "made."
    ),
]
Searches = Annotated[
    tuple[Path, ...],
    option("Files or folders of alignments, template hits and their structures, as for prepare."),
]
