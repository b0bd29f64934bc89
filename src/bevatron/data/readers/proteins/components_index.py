"""Components of a dictionary as the columns of an Arrow file, one row per component."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64

from bevatron.data.compressed import read_blocks
from bevatron.data.readers.elements import PDB_NUMBERS
from bevatron.data.readers.proteins.cif import Table, parse_cif
from bevatron.errors import DataError, require
from bevatron.files import atomic_write
from bevatron.typing import FloatArray, IntArray

FORMAT = b"bevatron components 3"
KEY, STRUCTURE = b"source", b"structure"
CHECKSUM = "checksum"

_COMPONENT = {
    "code": "id",
    "name": "name",
    "type": "type",
    "parent": "mon_nstd_parent_comp_id",
    "letter": "one_letter_code",
    "status": "pdbx_release_status",
    "replaced_by": "pdbx_replaced_by",
}
_ATOM = {
    "comp": "comp_id",
    "name": "atom_id",
    "other_name": "alt_atom_id",
    "element": "type_symbol",
    "charge": "charge",
    "leaving": "pdbx_leaving_atom_flag",
    "aromatic": "pdbx_aromatic_flag",
    **{f"ideal_{axis}": f"pdbx_model_Cartn_{axis}_ideal" for axis in "xyz"},
    **{f"model_{axis}": f"model_Cartn_{axis}" for axis in "xyz"},
}
_BOND = {
    "comp": "comp_id",
    "first": "atom_id_1",
    "second": "atom_id_2",
    "order": "value_order",
    "aromatic": "pdbx_aromatic_flag",
}
_CATEGORIES = {"_chem_comp": _COMPONENT, "_chem_comp_atom": _ATOM, "_chem_comp_bond": _BOND}
_ORDERS = {"SING": 1, "DOUB": 2, "TRIP": 3, "QUAD": 4}
_PIECE = 1 << 24
Columns: TypeAlias = dict[str, dict[str, list[str]]]


def read_columns(path: Path, *, binary: bool) -> Columns:
    """Read the texts of all components by category and column.

    Raises DataError if it is damaged or holds no component, or no atoms of any.

    Parameters
    ----------
    binary : whether it is BinaryCIF, which biotite reads
    """
    columns: Columns = {
        category: {name: [] for name in tags} for category, tags in _CATEGORIES.items()
    }
    if binary:
        _add_binary(columns, path)
    else:
        for text in _pieces(path):
            for block in parse_cif(text, str(path)):
                _add_block(columns, block, str(path))
    if not columns["_chem_comp"]["code"]:
        raise DataError(
            f"{path}: holds no component (_chem_comp.id); give components.cif of the wwPDB"
        )
    if not columns["_chem_comp_atom"]["name"]:
        raise DataError(
            f"{path}: names components but not their atoms (_chem_comp_atom), as files of "
            "structures do; give components.cif of the wwPDB"
        )
    return columns


def _pieces(path: Path) -> Iterator[bytes]:
    """Split the text between data blocks, so that the parser never holds all of it."""
    parts: list[bytes] = []
    size = 0
    for part in read_blocks(path):
        parts.append(part)
        size += len(part)
        if size < _PIECE:
            continue
        text = b"".join(parts)
        cut = text.rfind(b"\ndata_") + 1
        if cut > 0:
            yield text[:cut]
        parts, size = [text[cut:]], 0
    rest = b"".join(parts)
    if rest.strip():
        yield rest


def _add_block(columns: Columns, block: Any, name: str) -> None:
    for category, tags in _CATEGORIES.items():
        table = Table(block, category, name)
        key = next(iter(tags.values()))
        rows = len(table.texts(key))
        for column, tag in tags.items():
            columns[category][column] += table.texts(tag, rows)


def _add_binary(columns: Columns, path: Path) -> None:
    pdbx = require("biotite.structure.io.pdbx", "ccd")
    block = next(iter(pdbx.BinaryCIFFile.read(path).values()))
    for category, tags in _CATEGORIES.items():
        found = block[category.removeprefix("_")]
        for column, tag in tags.items():
            if tag in found:
                texts = found[tag].as_array(str, masked_value="").tolist()
                columns[category][column] += ["" if t in {"?", "."} else t for t in texts]
            else:
                columns[category][column] += [""] * found.row_count


def write_index(path: Path, columns: Columns, key: str, source: Path) -> None:
    """Write the index of a source, which messages name; it is there only when complete.

    Raises DataError if a component is listed twice, a value is not a number, a bond names an atom
    that is not there, or the file cannot be written.
    """
    name = str(source)
    components, atoms, bonds = (columns[category] for category in _CATEGORIES)
    rows: dict[str, int] = {}
    for code in components["code"]:
        if code in rows:
            raise DataError(f"{name}: the dictionary lists the component '{code}' twice")
        rows[code] = len(rows)
    atom_order, atom_ptr = _grouped(atoms["comp"], rows)
    bond_order, bond_ptr = _grouped(bonds["comp"], rows)
    pairs = _pairs(atoms, bonds, atom_order, bond_order, atom_ptr, rows, name)

    def texts(column: str) -> Any:
        return pa.array(_tidied(column, components[column]), pa.string())

    def per_atom(values: npt.NDArray[Any], width: int = 1) -> Any:
        return _lists(atom_ptr * width, pa.array(values[atom_order].ravel()))

    def per_bond(values: npt.NDArray[Any]) -> Any:
        return _lists(bond_ptr, pa.array(values[bond_order]))

    order = pa.array(atom_order)
    names, others = (
        pa.array(atoms[column], pa.string()).take(order) for column in ("name", "other_name")
    )
    table = pa.table(
        {column: texts(column) for column in _COMPONENT}
        | {
            "atoms": _lists(atom_ptr, names),
            "other_names": _lists(atom_ptr, others),
            "elements": per_atom(_mapped(atoms["element"], PDB_NUMBERS)),
            "charges": per_atom(_charges(atoms["charge"], name)),
            "leaving": per_atom(_mapped(atoms["leaving"], {"Y": 1})),
            "aromatic": per_atom(_mapped(atoms["aromatic"], {"Y": 1})),
            "ideal": per_atom(_points(atoms, "ideal", name), 3),
            "model": per_atom(_points(atoms, "model", name), 3),
            "bonds": _lists(bond_ptr * 2, pa.array(pairs.ravel())),
            "orders": per_bond(_mapped(bonds["order"], _ORDERS)),
            "aromatic_bonds": per_bond(_mapped(bonds["aromatic"], {"Y": 1})),
        },
        metadata={b"format": FORMAT, KEY: key},
    )
    columns_ = {name: table.column(name).combine_chunks() for name in table.column_names}
    sums = [row_checksum(columns_, row) for row in range(table.num_rows)]
    table = table.append_column(CHECKSUM, pa.array(sums, pa.uint64()))
    table = table.replace_schema_metadata(
        {**table.schema.metadata, STRUCTURE: structure_checksum(columns_).encode()}
    )
    with atomic_write(path, DataError) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def row_checksum(columns: Mapping[str, Any], row: int) -> int:
    """Hash all values of a component."""
    digest = xxh3_64()
    for name, column in columns.items():
        if name == CHECKSUM:
            continue
        value = column[row]
        if pa.types.is_string(column.type):
            digest.update(value.as_py().encode())
        elif pa.types.is_string(column.type.value_type):
            digest.update("\0".join(value.as_py()).encode())
        else:
            digest.update(value.values.to_numpy(zero_copy_only=True).tobytes())
    return digest.intdigest()


def structure_checksum(columns: Mapping[str, Any]) -> str:
    """Hash the offsets and codes of the components, which no component's checksum covers.

    Reading a value at a wrong place may end the process.
    """
    digest = xxh3_64()
    for name, column in columns.items():
        if name != CHECKSUM:
            parts = column.buffers()
            digest.update(parts[1])
            if name == "code":
                digest.update(parts[2])
            elif pa.types.is_large_list(column.type) and pa.types.is_string(column.type.value_type):
                digest.update(parts[3])
    return digest.hexdigest()


def _tidied(column: str, texts: list[str]) -> list[str]:
    if column == "type":
        return [text.upper() for text in texts]
    if column == "parent":
        # A residue fused of several, such as a chromophore, derives from none of them.
        return ["" if "," in text else text for text in texts]
    return texts


def _grouped(codes: list[str], rows: Mapping[str, int]) -> tuple[IntArray, IntArray]:
    """Sort by component: the order, and where each begins."""
    row = np.fromiter((rows.get(code, -1) for code in codes), np.int64, len(codes))
    order = np.argsort(row, kind="stable")
    order = order[row[order] >= 0]
    return order, np.searchsorted(row[order], np.arange(len(rows) + 1)).astype(np.int64)


def _pairs(
    atoms: Mapping[str, list[str]],
    bonds: Mapping[str, list[str]],
    atom_order: IntArray,
    bond_order: IntArray,
    atom_ptr: IntArray,
    rows: Mapping[str, int],
    name: str,
) -> npt.NDArray[np.int32]:
    """Find the two atoms of each bond, sorted by component, int32 [bonds, 2]."""
    place: dict[tuple[str, str], int] = {}
    for sorted_row, i in enumerate(atom_order.tolist()):
        code = atoms["comp"][i]
        place[code, atoms["name"][i]] = sorted_row - int(atom_ptr[rows[code]])
    pairs = np.empty((len(bond_order), 2), dtype=np.int32)
    for row, i in enumerate(bond_order.tolist()):
        code = bonds["comp"][i]
        for side, column in enumerate(("first", "second")):
            atom = bonds[column][i]
            if (code, atom) not in place:
                raise DataError(
                    f"{name}: component '{code}' has a bond to '{atom[:40]}', which is none of its "
                    "atoms; the dictionary is damaged"
                )
            pairs[row, side] = place[code, atom]
    return pairs


def _lists(offsets: IntArray, values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _mapped(texts: list[str], values: Mapping[str, int]) -> npt.NDArray[np.uint8]:
    known = {text: values.get(text.upper(), 0) for text in set(texts)}
    return np.fromiter((known[text] for text in texts), np.uint8, len(texts))


def _floats(texts: list[str], default: float, name: str) -> FloatArray:
    try:
        return np.fromiter((float(t) if t else default for t in texts), np.float64, len(texts))
    except ValueError as error:
        reason = str(error)[:80]
        raise DataError(f"{name}: {reason} in the dictionary; it is damaged") from None


def _charges(texts: list[str], name: str) -> npt.NDArray[np.int8]:
    charges = _floats(texts, 0, name)
    wrong = np.flatnonzero(~(np.abs(charges) <= 100))
    if len(wrong):
        raise DataError(
            f"{name}: '{texts[wrong[0]][:40]}' is not an atom's charge; the dictionary is damaged"
        )
    return charges.astype(np.int8)


def _points(atoms: Mapping[str, list[str]], kind: str, name: str) -> npt.NDArray[np.float32]:
    axes = [_floats(atoms[f"{kind}_{axis}"], np.nan, name) for axis in "xyz"]
    with np.errstate(over="ignore"):
        return np.stack(axes, axis=1).astype(np.float32)
