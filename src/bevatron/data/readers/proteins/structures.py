"""Structures of proteins, nucleic acids and ligands: mmCIF, BinaryCIF and PDB files.

All are read by `parse_structure`; gemmi first turns a PDB file into an mmCIF block.
"""

import datetime as dt
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.compressed import MAX_BYTES, read_whole
from bevatron.data.ragged import pointer
from bevatron.data.readers.proteins.atom_site import Sites, read_sites
from bevatron.data.readers.proteins.binary_cif import is_binary_cif, parse_binary_cif
from bevatron.data.readers.proteins.cif import Table, gemmi, parse_cif
from bevatron.data.readers.proteins.connections import read_assemblies, read_links
from bevatron.data.readers.proteins.entities import Entities, one_letter
from bevatron.data.readers.proteins.structure import (
    POLYMERS,
    UNKNOWN_NUMBER,
    Atoms,
    Chains,
    Residues,
    Structure,
)
from bevatron.errors import DataError
from bevatron.typing import IntArray

# A line at a time: blanks that may match in two ways take forever in a file of blanks.
_CIF = re.compile(
    rb"(?:\xef\xbb\xbf)?(?:[ \t\r\v\f]*(?:#[^\n]*)?\n)*[ \t\r\v\f]*data_", re.IGNORECASE
)
_PDB = re.compile(rb"^(?:ATOM  |HETATM)", re.MULTILINE)
_FIELD = rb" {0,7}[-+]?[0-9.]"
# gemmi takes what it understands of a number, 1.0 of "1x.104", and zero of nothing.
_NO_POSITION = re.compile(
    rb"^(?:ATOM  |HETATM)(?!(?=[^\n]{24}[-+ 0-9.]{24})(?=.{24}%b)(?=.{32}%b)(?=.{40}%b))[^\n]*"
    % (_FIELD, _FIELD, _FIELD),
    re.MULTILINE,
)
_REVISION = re.compile(rb"^REVDAT   1   (\d\d-[A-Z]{3}-\d\d)", re.MULTILINE)
WORST_RESOLUTION = 1000.0
"""Å; of subtomogram averages, 100 at most."""

_BONDED = 2.4
"""Å; maximum distance of bonded atoms of consecutive residues."""

_WIDEST_GAP = 1000
"""Maximum gap in residue numbers; authors number freely."""

_RESOLUTIONS = (
    ("_refine", "ls_d_res_high"),
    ("_em_3d_reconstruction", "resolution"),
    ("_reflns", "d_resolution_high"),
)
_RELEASED = (("_pdbx_audit_revision_history", "revision_date"), ("_database_PDB_rev", "date"))


def read_structure(
    path: str | Path, model: int | None = None, max_bytes: int = MAX_BYTES
) -> Structure:
    """Read an mmCIF, BinaryCIF or PDB file, also compressed (gzip, bzip2, xz, Zstandard).

    One of several alternative locations is kept, and one of several components that share a place
    (`atom_site.read_sites` has the rule). Residues of a polymer's sequence without coordinates are
    included, without atoms; a chain none of whose residues has coordinates is left out. Raises
    DataError if the file is damaged or no such file, has no atoms or no such model, or a position
    is not finite; MissingPackageError if gemmi is not installed.

    Parameters
    ----------
    path : the file; its content decides which format it is
    model : number of the model (NMR entries have many); None for the first
    max_bytes : how many bytes it may hold when decompressed
    """
    return parse_structure(read_whole(path, max_bytes), str(path), model)


def parse_structure(data: bytes, name: str, model: int | None = None) -> Structure:
    """Read a structure from memory; ``name`` is that of the file in messages.

    Raises DataError and MissingPackageError as `read_structure`.
    """
    released = None
    if is_binary_cif(data):
        block = parse_binary_cif(data, name)
    elif _CIF.match(data):
        block = _block_of_cif(data, name)
    elif _PDB.search(data):
        block = _block_of_pdb(data, name)
        found = _REVISION.search(data)
        released = _pdb_date(found[1].decode()) if found else None
    else:
        raise DataError(f"{name}: {_what_else(data)}; expected mmCIF or PDB text with atoms")
    sites, number, models = read_sites(block, name, model)
    entities = Entities(block, name)
    residues, chains, order = _tables(sites, entities)
    atoms = Atoms(**sites.columns, residue=order)
    status = Table(block, "_pdbx_database_status", name)
    methods = (text.upper() for text in Table(block, "_exptl", name).texts("method"))
    return Structure(
        name=Table(block, "_entry", name).text("id") or block.name,
        methods=tuple(text for text in methods if text),
        resolution=_resolution(block, name),
        released=released or _first_date(block, name),
        deposited=_date(status.text("recvd_initial_deposition_date")),
        model=number,
        models=models,
        atoms=atoms,
        residues=residues,
        chains=chains,
        links=read_links(block, name, chains, residues, atoms),
        assemblies=read_assemblies(block, name),
    )


def _what_else(data: bytes) -> str:
    if not data.strip():
        return "is empty"
    return "is UTF-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "is neither mmCIF nor PDB"


def _block_of_cif(data: bytes, name: str) -> Any:
    blocks = parse_cif(data.removeprefix(b"\xef\xbb\xbf"), name)
    block = next((b for b in blocks if "Cartn_x" in Table(b, "_atom_site", name)), None)
    if block is None:
        raise DataError(f"{name}: holds no atoms (_atom_site); it is not a structure or is cut off")
    sites = Table(block, "_atom_site", name)
    labelled = any(sites.texts("label_asym_id"))
    if labelled and ("label_entity_id" in sites or "id" in Table(block, "_struct_asym", name)):
        return block
    return _completed(lambda: gemmi().make_structure_from_block(block), name)


def _block_of_pdb(data: bytes, name: str) -> Any:
    damaged = _NO_POSITION.search(data)
    if damaged:
        line = data.count(b"\n", 0, damaged.start()) + 1
        text = damaged[0].decode("ascii", "replace").rstrip()
        raise DataError(
            f"{name}, line {line}: has no three numbers in columns 31 to 54, found '{text}'"
        )
    return _completed(lambda: _with_named_chains(gemmi().read_pdb_string(data)), name)


def _with_named_chains(structure: Any) -> Any:
    """Name chains that have no name; gemmi does not take those for polymers."""
    used = {chain.name for model in structure for chain in model}
    name = next(
        each for each in f"{string.ascii_uppercase}{string.ascii_lowercase}_" if each not in used
    )
    for chain in (chain for model in structure for chain in model if not chain.name):
        chain.name = name
    return structure


def _completed(make: Callable[[], Any], name: str) -> Any:
    """Let gemmi find the entities of a file that names chains only, and write them as mmCIF."""
    try:
        structure = make()
        structure.setup_entities()
        structure.assign_label_seq_id()
        block = structure.make_mmcif_document().sole_block()
        if structure.resolution > 0 and not Table(block, "_refine", name).text("ls_d_res_high"):
            block.set_pair("_refine.ls_d_res_high", str(structure.resolution))
    except UnicodeDecodeError:
        raise DataError(f"{name}: holds bytes that are not UTF-8; save the file as UTF-8") from None
    except (ValueError, RuntimeError, IndexError) as error:
        raise DataError(f"{name}: cannot be read ({error}); the file is damaged") from None
    return block


def _tables(sites: Sites, entities: Entities) -> tuple[Residues, Chains, Any]:
    """Merge observed residues into the sequences of their chains."""
    edges = np.searchsorted(sites.chain, np.arange(len(sites.labels) + 1)).tolist()
    authors = entities.author_numbers()
    columns: dict[str, list[Any]] = {k: [] for k in ("component", "kind", "number", "author")}
    insertions: list[str] = []
    kinds: list[str] = []
    names: list[str] = []
    counts: list[int] = []
    places = np.empty(len(sites.number), dtype=np.int64)
    for chain, label in enumerate(sites.labels):
        rows = slice(edges[chain], edges[chain + 1])
        entity = sites.entities[chain] or entities.of_chain.get(label, "")
        kind = entities.kind(entity, sites, rows)
        if kind in POLYMERS and (sites.number[rows] > 0).all():
            numbers, codes, entity = entities.sequence(label, entity, sites, rows)
            place = np.searchsorted(numbers, sites.number[rows])
        else:
            codes = sites.component[rows].tolist()
            place = np.arange(len(codes))
            numbers = _numbers(sites, rows) if kind in POLYMERS else place + 1
        known = authors.get(label, {})
        listed = [known.get(n, (UNKNOWN_NUMBER, "")) for n in numbers.tolist()]
        author, insertion = [a for a, _ in listed], [i for _, i in listed]
        for at, number, code in zip(
            place.tolist(),
            sites.author_number[rows].tolist(),
            sites.insertion[rows].tolist(),
            strict=True,
        ):
            author[at], insertion[at] = number, code
        places[rows] = place + sum(counts)
        columns["component"] += codes
        columns["kind"] += [kind] * len(codes)
        columns["number"] += numbers.tolist()
        columns["author"] += author
        insertions += insertion
        kinds.append(kind)
        names.append(entity)
        counts.append(len(codes))
    parent = {code: entities.parent(code) for code in set(columns["component"])}
    parents = [
        parent[code] if kind in POLYMERS else ""
        for code, kind in zip(columns["component"], columns["kind"], strict=True)
    ]
    letters = [one_letter(p, k) for p, k in zip(parents, columns["kind"], strict=True)]
    atom_counts = np.zeros(len(parents), dtype=np.int64)
    atom_counts[places] = np.diff(sites.atom_ptr)
    residues = Residues(
        component=np.array(columns["component"], dtype=np.str_),
        parent=np.array(parents, dtype=np.str_),
        letter=np.array(letters, dtype=np.str_),
        chain=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        number=np.array(columns["number"], dtype=np.int32),
        author_number=np.array(columns["author"], dtype=np.int32),
        insertion=np.array(insertions, dtype=np.str_),
        atom_ptr=pointer(atom_counts),
    )
    chains = Chains(
        label=np.array(sites.labels, dtype=np.str_),
        author=np.array(sites.authors, dtype=np.str_),
        entity=np.array(names, dtype=np.str_),
        kind=np.array(kinds, dtype=np.str_),
        residue_ptr=pointer(counts),
    )
    return residues, chains, np.repeat(places, np.diff(sites.atom_ptr)).astype(np.int32)


def _numbers(sites: Sites, rows: slice) -> IntArray:
    """Return numbers of residues without a sequence, with room for those that are missing.

    These are as many as the author's numbers skip where two residues are apart; one where the
    numbers go back, as in chains that were joined.
    """
    position = sites.columns["position"]
    first = rows.start
    skipped = np.diff(sites.author_number[rows].astype(np.int64))
    step = np.where(skipped < 0, 2, np.clip(skipped, 1, _WIDEST_GAP))
    for place in np.flatnonzero(step > 1).tolist():
        begin, middle, end = sites.atom_ptr[first + place : first + place + 3]
        apart = position[begin:middle, None] - position[None, middle:end]
        if np.square(apart).sum(axis=-1).min() < _BONDED**2:
            step[place] = 1
    return np.cumsum([1, *step])


def _resolution(block: Any, name: str) -> float | None:
    """Take the best of several values, as in a joint refinement; zero and 10^6 mean none."""
    for category, tag in _RESOLUTIONS:
        table = Table(block, category, name)
        values = table.floats(tag, len(table.texts(tag)))
        known = [v for v in values.tolist() if 0 < v < WORST_RESOLUTION]
        if known:
            return float(min(known))
    return None


def _first_date(block: Any, name: str) -> dt.date | None:
    for category, tag in _RELEASED:
        dates = [_date(text) for text in Table(block, category, name).texts(tag)]
        known = [date for date in dates if date is not None]
        if known:
            return min(known)
    return None


def _date(text: str) -> dt.date | None:
    """Parse ``1998-04-08``; what is before the archive (1971) is a filler."""
    try:
        date = dt.date.fromisoformat(text)
    except ValueError:
        return None
    return date if date.year >= 1971 else None


def _pdb_date(text: str) -> dt.date | None:
    """Parse ``07-JAN-98``; the archive began in 1971."""
    months = "JANFEBMARAPRMAYJUNJULAUGSEPOCTNOVDEC"
    day, month, year = text.split("-")
    place = months.find(month)
    if place < 0 or place % 3:
        return None
    century = 1900 if int(year) >= 70 else 2000
    return _date(f"{century + int(year)}-{place // 3 + 1:02d}-{day}")
