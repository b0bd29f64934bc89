"""The commands for protein chains: typed arguments, each calls one function."""

from pathlib import Path

from bevatron.output import say
from bevatron.recipes.arguments import Files, PrepareOptions, Preparing


def recognises(path: Path) -> bool:
    """Whether a path looks like structures or alignments, or a folder of them."""
    from bevatron.data.readers.proteins.folders import is_protein_file

    return is_protein_file(path)


def prepare(
    files: Files,
    out: Path,
    strict: bool = False,
    options: Preparing = PrepareOptions(),  # noqa: B008  frozen
) -> None:
    """Compute the features of protein chains once, in parallel, into a store.

    Start it again after a kill and it resumes. Processes started by srun or mpirun share the work.
    Files that cannot be used are listed in OUT-rejects.csv, and the rest goes on.

    Parameters
    ----------
    files
        Structures (.cif, .pdb), alignments (.a3m, .sto), all also .gz, .bz2, .xz or .zst, and
        folders of them at any depth. An alignment belongs to every chain of its first sequence.
    out
        Folder of the store.
    strict
        Stop at the first file that cannot be used.
    options
        How the store is written.

    Examples
    --------
    bevatron prepare alphafold2 FOLDER --out chains
    """
    from bevatron.recipes.alphafold2.stores import prepare_chains

    say(*prepare_chains(files, out, strict=strict, **vars(options)))
