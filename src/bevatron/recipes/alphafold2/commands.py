"""The commands for protein chains: typed arguments, each calls one function."""

from pathlib import Path
from typing import Any

from bevatron.output import Result, say
from bevatron.recipes.arguments import (
    Device,
    Files,
    Model,
    NewStore,
    Out,
    PrepareOptions,
    Preparing,
    RunFolder,
    Source,
    TableFile,
)
from bevatron.recipes.proteins.arguments import (
    Clusters,
    LowestPlddt,
    ProteinFiles,
    ReleasedBefore,
    ReleasedFrom,
    Searches,
    Strict,
)


def prepare(
    files: ProteinFiles,
    out: NewStore,
    strict: Strict = False,
    lowest_plddt: LowestPlddt = None,
    released_before: ReleasedBefore = None,
    released_from: ReleasedFrom = None,
    clusters: Clusters = None,
    options: Preparing = PrepareOptions(),  # noqa: B008  frozen
) -> None:
    """Compute the features of protein chains once, in parallel, into a store.

    Start it again after a kill and it resumes. Processes started by srun or mpirun share the work.
    Files that cannot be used are listed in OUT-rejects.csv.

    Examples
    --------
    bevatron prepare alphafold2 FOLDER --out chains
    """
    from bevatron.recipes.alphafold2.stores import prepare_chains

    say(*prepare_chains(
        files, out, strict=strict, lowest_plddt=lowest_plddt, released_before=released_before,
        released_from=released_from, clusters=clusters, **vars(options),
    ))  # fmt: skip


def evaluate(
    model: Model,
    files: Files,
    device: Device = "auto",
    most: int | None = None,
    out: TableFile = None,
    pictures: Path | None = None,
) -> Result:
    """Compare the structures that a model predicts with known ones.

    Parameters
    ----------
    files : stores of chains, or structures, alignments and folders of them, as prepare takes them
    most : maximum number of chains of each store
    pictures : also draw each chain into this folder: lDDT by residue, both structures superposed

    Examples
    --------
    bevatron evaluate runs/chains test-store
    """
    from bevatron.recipes.alphafold2.evaluate import evaluate_stores, print_table_of

    table = evaluate_stores(model, files, device=device, most=most, out=out, pictures=pictures)
    return Result(table, lambda: print_table_of(table))


def predict(
    model: Model,
    source: Source,
    out: Out,
    seed: int = 0,
    device: Device = "auto",
    searches: Searches = (),
) -> Result:
    """Predict the structures of protein chains, with confidences.

    Parameters
    ----------
    source
        FASTA of chains, or a JSON or YAML of AlphaFold3, Protenix or Boltz, which may name
        alignments and templates.
    out
        Folder for NAME.cif and NAME.pdb, with pLDDT as B-factors, and a page for each chain; of a
        model with a head for the aligned error also NAME-pae.npz.
    seed : random seed of the rows drawn from the alignment

    Examples
    --------
    bevatron predict runs/chains chains.fasta predicted --searches alignments
    """
    from bevatron.recipes.alphafold2.predict import predict_files

    done = predict_files(model, source, out, seed=seed, device=device, searches=searches)

    def line(row: dict[str, Any]) -> str:
        what = f" ({row['description']})" if row["description"] else ""
        surest = "" if row["ptm"] is None else f", pTM {row['ptm']:.2f}"
        return f"{row['file']}{what}, with its page: pLDDT {row['plddt']:.1f}{surest}"

    return Result(done, lambda: say(*map(line, done["chains"])))


def convert(file: Source, out: Out, preset: str | None = None) -> None:
    """Convert weights of OpenFold, MLPerf HPC or DeepMind to a model folder.

    Parameters
    ----------
    file
        ``params_model_*.npz`` of DeepMind, or a file of torch of OpenFold or MLPerf HPC, with or
        without templates.
    out : the model folder, with which predict and evaluate work
    preset : sizes of the model; by default alphafold2 or alphafold2-ptm, whichever fits

    Examples
    --------
    bevatron convert alphafold2 params_model_1_ptm.npz models/alphafold2
    """
    from bevatron.recipes.alphafold2.start import to_folder

    say(to_folder(file, out, preset))


def convert_to_openfold(model: Model, out: Out) -> None:
    """Write a run or a model folder as a file of OpenFold.

    Parameters
    ----------
    out : the file, ``NAME.pt``

    Examples
    --------
    bevatron convert to-openfold runs/chains openfold.pt
    """
    from bevatron.recipes.alphafold2.start import to_openfold_file

    say(to_openfold_file(model, out))


def convert_to_mlperf(run: RunFolder, out: Out, merged: bool = False) -> None:
    """Write the newest checkpoint of a run, with Adam's moments, as MLPerf HPC resumes it.

    Parameters
    ----------
    out : the file, ``NAME.pt``
    merged : join queries, keys, values and gates of each attention, as in ScaleFold

    Examples
    --------
    bevatron convert to-mlperf runs/chains resumable_checkpoint.pt
    """
    from bevatron.recipes.alphafold2.start import to_mlperf_file

    say(to_mlperf_file(run, out, merged=merged))


def convert_to_deepmind(model: Model, out: Out) -> None:
    """Write a run or a model folder as a parameter file of DeepMind.

    Parameters
    ----------
    out : the file, ``NAME.npz``

    Examples
    --------
    bevatron convert to-deepmind runs/chains params_model_1.npz
    """
    from bevatron.recipes.alphafold2.start import to_deepmind_file

    say(to_deepmind_file(model, out))
