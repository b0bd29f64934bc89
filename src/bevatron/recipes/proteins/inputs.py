"""Alignments and templates of the chains to predict, from the input file and from folders."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bevatron.data.proteins.alignment_files import OF_NO_CHAIN, AlignmentReader
from bevatron.data.proteins.alignments import Alignments, prepare_alignments, sequence_key
from bevatron.data.proteins.given_templates import given_templates
from bevatron.data.proteins.hit_files import NamedChain, entry_code, template_queries
from bevatron.data.proteins.places import ChainSequences, difference
from bevatron.data.proteins.template_search import find_templates
from bevatron.data.proteins.template_store import TemplatesInMemory
from bevatron.data.readers.proteins.alphabet import Polymer, sequence_classes
from bevatron.data.readers.proteins.folders import ProteinFiles, find_protein_files, is_rna
from bevatron.data.readers.proteins.inputs import Complex, Entity
from bevatron.errors import ConfigError, DataError
from bevatron.output import note

LONGEST = 200
"""Bytes of a file's name that are kept: file systems take 255, of which endings need a few."""

_ALIGNED: dict[str, Polymer] = {"protein": "protein", "rna": "rna"}


def file_names(names: Sequence[str]) -> list[str]:
    """Make names of files: no separators, none twice, and none too long for a file system.

    Examples
    --------
    >>> file_names(["../a b", "a_b", "a", "a"])
    ['_a_b', 'a_b', 'a', 'a-2']
    """
    made: list[str] = []
    for name in names:
        kept = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).strip(".")
        kept = kept.encode()[:LONGEST].decode(errors="ignore") or "complex"
        others = (f"{kept}-{number}" for number in count(2))
        made.append(next(each for each in chain([kept], others) if each not in made))
    return made


class Known(NamedTuple):
    """Alignments and templates of the chains of an input.

    Attributes
    ----------
    alignments, templates : by sequence; None if there are none
    """

    alignments: Alignments | None
    templates: TemplatesInMemory | None


def check_seeds(seeds: Sequence[int], where: str) -> None:
    """Refuse seeds that random numbers cannot begin with, or that occur twice.

    Raises ConfigError.
    """
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"{where}: expected a whole number from 0 to 2^63 - 1, got {seed}")
        if list(seeds).count(seed) > 1:
            raise ConfigError(f"{where}: {seed} is given more than once")


@contextmanager
def known_of(given: Complex, searches: Sequence[Path] = ()) -> Iterator[Known]:
    """Look up alignments and templates of an input; they are read while the context lasts.

    Those that the input names come first; what it calls empty stays empty. Raises DataError if an
    alignment is not of its chain, or a file is damaged.

    Parameters
    ----------
    searches : files or folders of alignments, template hits, and the structures that they name
    """
    found = find_protein_files(searches) if searches else None
    with TemporaryDirectory() as folder, _named(given, Path(folder)):
        reader = _reader(given, found, Path(folder))
        alignments = None
        if reader is not None and reader.num_samples:
            alignments = prepare_alignments(reader, Path(folder) / "alignments", workers=0)
        if searches and (lacking := _without_alignment(given, alignments)):
            note(f"note: {given.name}: the searches hold no alignment of {', '.join(lacking)}")
        beside = {} if reader is None else reader.queries
        yield Known(alignments, _templates(given, found, beside) or None)


@contextmanager
def _named(given: Complex, folder: Path) -> Iterator[None]:
    """Say where an alignment is in the input, and in which file unless that was a copy."""
    try:
        yield
    except DataError as error:
        text = str(error)
        for number, entity in enumerate(given.entities):
            for name, source in (("paired", entity.paired), ("unpaired", entity.unpaired)):
                own = f"{given.where}, chain {entity.chains[0]}, {name} alignment"
                text = text.replace(str(folder / str(number) / f"{name}.a3m"), own)
                if isinstance(source, Path) and text.startswith(str(source)):
                    text = f"{own}: {text}"
        if text == str(error):
            raise
        raise type(error)(text) from error


def _classes(entity: Entity) -> bytes:
    return sequence_classes(_ALIGNED[entity.kind], entity.sequence).tobytes()


def _reader(given: Complex, found: ProteinFiles | None, folder: Path) -> AlignmentReader | None:
    """Read the alignments that the entities name and those of folders."""
    files: dict[str, list[Path]] = {"protein": [], "rna": []}
    wanted: dict[bytes, str] = {}
    own: list[tuple[Path, Entity]] = []
    for number, entity in enumerate(given.entities):
        if entity.kind not in files:
            continue
        named = _files(entity, folder / str(number))
        files[entity.kind] += named
        own += [(path, entity) for path in named]
        if named or (entity.unpaired is None and entity.paired is None):
            wanted.setdefault(_classes(entity), f"chain {entity.chains[0]}")
    for path in () if found is None else found.alignments:
        files["rna" if is_rna(path) else "protein"].append(path)
    if not any(files.values()):
        return None
    reader = AlignmentReader(files["protein"], files["rna"], chains=ChainSequences(wanted, wanted))
    for path, entity in own:
        query, chain = reader.queries[path], _classes(entity)
        if query != chain:
            raise DataError(f"{path}: {difference(query, chain, f'chain {entity.chains[0]}')}")
    # Where all have an alignment, those that nearly fit may well be of other inputs: of mutants.
    near = [] if reader.num_samples == len(wanted) else reader.rejects
    for file, reason in near:  # the entities' own have been refused
        if reason != OF_NO_CHAIN:
            note(f"note: {given.name}: {file} is not used: {reason}")
    return reader


def _without_alignment(given: Complex, alignments: Alignments | None) -> list[str]:
    """Name the proteins whose alignment was looked for and not found."""
    return [
        f"chain {entity.chains[0]}"
        for entity in given.entities
        if entity.kind == "protein"
        and entity.unpaired is None
        and entity.paired is None
        and (alignments is None or alignments.find(_classes(entity)) is None)
    ]


def _files(entity: Entity, folder: Path) -> list[Path]:
    """Return the alignments of an entity as files."""
    found = []
    for name, source in (("paired", entity.paired), ("unpaired", entity.unpaired)):
        if isinstance(source, Path):
            found.append(source)
        elif source:
            folder.mkdir(exist_ok=True)
            path = folder / f"{name}.a3m"
            path.write_text(source, encoding="utf-8")
            found.append(path)
    return found


def _templates(
    given: Complex, found: ProteinFiles | None, alignments: dict[Path, bytes]
) -> TemplatesInMemory:
    """Take the templates that the entities name, for the others those that searches found."""
    templates = TemplatesInMemory()
    chains = []
    for entity in given.entities:
        if entity.kind != "protein":
            continue
        classes = _classes(entity)
        if entity.templates is None:
            chains.append(NamedChain(given.name.lower(), entity.chains, classes))
            # A header may name a chain of an entry: 1abc_A.
            words = *entity.chains, *entity.description.replace("|", " ").split()[:1]
            for code, _, name in (word.rpartition("_") for word in words):
                chains.append(NamedChain(code.lower(), (name,), classes))
        elif entity.templates:
            where = f"{given.where}, chain {entity.chains[0]}"
            templates[sequence_key(classes)] = given_templates(
                entity.sequence, entity.templates, where
            )
    if found is None or not found.hits or not chains:
        return templates
    sequences = ChainSequences(chain.classes for chain in chains)
    queries, others = template_queries(found.hits, chains, sequences, alignments, strict=True)
    for path, reason in others:
        note(f"note: {path}: {reason}")
    structures = {entry_code(path): path for path in reversed(found.structures)}
    for query in queries:
        of_query = find_templates(query, structures, strict=True)
        templates[sequence_key(query.classes)] = of_query.templates
        if of_query.absent:
            note(
                f"note: {given.name}: {len(of_query.absent)} entries that template hits name are "
                f"not among the structures, {', '.join(of_query.absent[:5])}"
            )
    return templates
