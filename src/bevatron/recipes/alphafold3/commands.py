"""The commands for complexes: typed arguments, each calls one function."""

from typing import Annotated, Any

from bevatron.output import Result, say
from bevatron.recipes.arguments import (
    Device,
    Files,
    Model,
    NewStore,
    Out,
    PrepareOptions,
    Preparing,
    Source,
    TableFile,
    option,
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

Components = Annotated[
    str,
    option(
        "The chemical component dictionary: components.cif of wwPDB or any part of it, or biotite, "
        "which includes it (pip install 'bevatron[ccd]')."
    ),
]
Steps = Annotated[int, option("Diffusion steps.")]


def prepare(
    files: ProteinFiles,
    out: NewStore,
    components: Components = "biotite",
    assembly: str = "1",
    max_tokens: int | None = None,
    keep_all: bool = False,
    strict: Strict = False,
    lowest_plddt: LowestPlddt = None,
    released_before: ReleasedBefore = None,
    released_from: ReleasedFrom = None,
    clusters: Clusters = None,
    options: Preparing = PrepareOptions(),  # noqa: B008  frozen
) -> None:
    """Compute the features of complexes once, in parallel, into a store.

    Start it again after a kill and it resumes. Processes started by srun or mpirun share the work.
    Files that cannot be used are listed in OUT-rejects.csv.

    Parameters
    ----------
    assembly : name of the biological assembly that is read where a file has any
    max_tokens : leave out complexes of more tokens
    keep_all
        Keep what AlphaFold3 is not trained on: structures above 9 Å or of more than 300 polymers,
        crystallization aids, and chains that clash, are broken, unknown or hardly observed.

    Examples
    --------
    bevatron prepare alphafold3 FOLDER --out complexes
    """
    from bevatron.recipes.alphafold3.stores import prepare_complexes

    say(*prepare_complexes(
        *(files, out), components=components, assembly=assembly, max_tokens=max_tokens,
        keep_all=keep_all, strict=strict, lowest_plddt=lowest_plddt,
        released_before=released_before, released_from=released_from, clusters=clusters,
        **vars(options),
    ))  # fmt: skip


def evaluate(
    model: Model,
    files: Files,
    samples: int = 1,
    steps: Steps = 200,
    device: Device = "auto",
    most: int | None = None,
    components: Components = "biotite",
    out: TableFile = None,
) -> Result:
    """Compare the structures that a model predicts with known ones.

    Parameters
    ----------
    files
        Stores of complexes, or structures, alignments and folders of them, as prepare takes them.
    samples : structures sampled for each complex; the best ranked counts
    most : maximum number of complexes of each store

    Examples
    --------
    bevatron evaluate runs/complexes test-store
    """
    from bevatron.recipes.alphafold3.evaluate import evaluate_stores, print_table_of

    table = evaluate_stores(
        *(model, files), samples=samples, steps=steps, device=device, most=most,
        components=components, out=out,
    )  # fmt: skip
    return Result(table, lambda: print_table_of(table))


def predict(
    model: Model,
    source: Source,
    out: Out,
    samples: int = 5,
    seeds: tuple[int, ...] = (),
    steps: Steps = 200,
    device: Device = "auto",
    components: Components = "biotite",
    searches: Searches = (),
) -> Result:
    """Predict the structures of complexes, ranked, with confidences.

    Parameters
    ----------
    source : FASTA of chains, or the JSON or YAML of AlphaFold3, AlphaFold Server, Protenix or Boltz
    out : folder; each complex gets mmCIF files with pLDDT as B-factors, scores.json and a page
    samples : structures sampled for each seed
    seeds : random seeds; by default those named in the file, else 0

    Examples
    --------
    bevatron predict runs/complexes complex.fasta predicted
    """
    from bevatron.recipes.alphafold3.predict import predict_files

    done = predict_files(
        *(model, source, out), samples=samples, seeds=seeds, steps=steps, device=device,
        components=components, searches=searches,
    )  # fmt: skip
    return Result(done, lambda: say(*map(_line, done["complexes"])))


def _line(row: dict[str, Any]) -> str:
    best = row["structures"][0]
    return (
        f"{row['name']}: {row['best']} and report.html; pLDDT {best['plddt']:.1f}, "
        f"pTM {best['ptm']:.2f}" + ("" if best["iptm"] is None else f", ipTM {best['iptm']:.2f}")
    )


def convert(file: Source, out: Out, preset: str = "alphafold3") -> None:
    """Convert a checkpoint of Protenix to a model folder.

    Parameters
    ----------
    file : a checkpoint of Protenix, or its state dict, ``.pt``
    out : the model folder, with which predict and evaluate work
    preset : sizes of the model

    Examples
    --------
    bevatron convert alphafold3 protenix.pt models/alphafold3
    """
    from bevatron.recipes.alphafold3.start import to_folder

    say(to_folder(file, out, preset))


def convert_to_protenix(model: Model, out: Out) -> None:
    """Write a run or a model folder as a checkpoint of Protenix.

    Parameters
    ----------
    out : the file, ``NAME.pt``

    Examples
    --------
    bevatron convert to-protenix runs/complexes protenix.pt
    """
    from bevatron.recipes.alphafold3.start import to_protenix_file

    say(to_protenix_file(model, out))
