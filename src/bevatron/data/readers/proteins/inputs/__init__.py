"""Inputs of predictions, in common formats.

FASTA of chains; JSON of AlphaFold3, of the AlphaFold Server and of Protenix; YAML of Boltz.
"""

from dataclasses import replace
from pathlib import Path

from bevatron.data.compressed import format_suffix, read_whole
from bevatron.data.readers.proteins.fasta import as_text
from bevatron.data.readers.proteins.inputs.complexes import (
    AtomName,
    Complex,
    Entity,
    Modification,
    Template,
)
from bevatron.errors import DataError

__all__ = ["AtomName", "Complex", "Entity", "Modification", "Template", "read_inputs"]

_FASTA = {".fasta", ".fa", ".fas", ".faa", ".fna"}


def read_inputs(path: str | Path) -> tuple[Complex, ...]:
    r"""Read the complexes of a file; a list of jobs in JSON gives several, else there is one.

    Raises DataError naming the file and the key or record of what is missing, unknown or
    contradicts itself.

    Parameters
    ----------
    path
        .fasta, .fa, .fas, .faa or .fna (all records are chains of one complex), .json (AlphaFold3,
        AlphaFold Server, Protenix), .yaml or .yml (Boltz), also compressed. Paths in it are
        relative to its folder.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "dimer.fasta"
    >>> _ = path.write_text(">A|protein\nMKV\n>B|ccd\nATP\n")
    >>> dimer = read_inputs(path)[0]
    >>> [(entity.kind, entity.chains, entity.sequence) for entity in dimer.entities]
    [('protein', ('A',), 'MKV'), ('ligand', ('B',), '')]
    """
    from bevatron.data.readers.proteins.inputs.alphafold3 import read_alphafold3
    from bevatron.data.readers.proteins.inputs.boltz import read_boltz
    from bevatron.data.readers.proteins.inputs.chains import read_chains
    from bevatron.data.readers.proteins.inputs.keyed import parse_json, parse_yaml
    from bevatron.data.readers.proteins.inputs.server import read_server

    path = Path(path)
    suffix = format_suffix(path)
    if suffix not in _FASTA | {".json", ".yaml", ".yml"}:
        raise DataError(
            f"{path}: is not in a known format of prediction inputs; the name must end in "
            ".fasta, .json or .yaml"
        )
    data, stem = read_whole(path), path.name[: path.name.lower().rindex(suffix)]
    if suffix in _FASTA:
        found = [read_chains(data, path, stem)]
    elif suffix != ".json":
        found = [read_boltz(parse_yaml(as_text(data, str(path)), str(path)), path, stem)]
    else:
        job = parse_json(as_text(data, str(path)), str(path))
        several = isinstance(job.value, list)
        found = []
        for part in job.items() if several else [job]:
            # Lists of jobs without a dialect are those of the server, and of Protenix.
            dialect = part.text("dialect", "alphafoldserver" if several else "alphafold3")
            read = read_server if dialect == "alphafoldserver" else read_alphafold3
            found.append(read(part, path, stem))
        if not found:
            raise DataError(f"{path}: is a list without a job")
    return tuple(replace(one, file=str(path)) for one in found)
