"""BinaryCIF gives the structure that the same mmCIF file gives."""

import gzip
import struct
from dataclasses import fields

import gemmi
import numpy as np
import pytest

from bevatron.data.readers.proteins import parse_structure
from bevatron.errors import DataError

pytestmark = pytest.mark.shared


def packed(value):
    """MessagePack of what BinaryCIF holds."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return b"\xd3" + struct.pack(">q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case bytes():
            return b"\xc6" + struct.pack(">I", len(value)) + value
        case str():
            return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
    head = (
        bytes([0x80 | len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))
    )
    return head + b"".join(packed(x) for pair in value.items() for x in pair)


def integers(values):
    """Differences, in runs, packed into two bytes each where they fit."""
    values = np.asarray(values, dtype=np.int64)
    steps = np.diff(values, prepend=values[0])
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    runs = np.stack([steps[starts], np.diff(starts, append=len(steps))], axis=1).ravel()
    parts = []
    for number in runs.tolist():
        limit = 32767 if number >= 0 else -32768
        times, rest = divmod(number, limit)
        parts += [*[limit] * times, rest]
    return {
        "data": np.array(parts, "<i2").tobytes(),
        "encoding": [
            {"kind": "Delta", "origin": int(values[0]), "srcType": 3},
            {"kind": "RunLength", "srcSize": len(values), "srcType": 3},
            {"kind": "IntegerPacking", "byteCount": 2, "isUnsigned": False, "srcSize": len(runs)},
            {"kind": "ByteArray", "type": 2},
        ],
    }


def texts(values):
    table, places = np.unique(values, return_inverse=True)
    places, offsets = integers(places), integers([0, *np.cumsum([len(x) for x in table])])
    encoding = {
        "kind": "StringArray", "stringData": "".join(table.tolist()), "offsets": offsets["data"],
        "dataEncoding": places["encoding"], "offsetEncoding": offsets["encoding"],
    }  # fmt: skip
    return {"data": places["data"], "encoding": [encoding]}


def column(name, values):
    mask = [{".": 1, "?": 2}.get(value, 0) for value in values]
    plain = [
        "" if hidden else gemmi.cif.as_string(v) for v, hidden in zip(values, mask, strict=True)
    ]
    if name.startswith("Cartn_") and not any(mask):
        thousandths = integers([round(1000 * float(value)) for value in plain])
        fixed = {"kind": "FixedPoint", "factor": 1000, "srcType": 33}
        data = {"data": thousandths["data"], "encoding": [fixed, *thousandths["encoding"]]}
    elif name in {"id", "label_seq_id"} and all(value.isdigit() for value in plain if value):
        data = integers([int(value or 0) for value in plain])
    else:
        data = texts(plain)
    return {"name": name, "data": data, "mask": integers(mask) if any(mask) else None}


def binary(text):
    block = gemmi.cif.read_string(text).sole_block()
    categories = []
    for category in block.get_mmcif_category_names():
        table = block.find_mmcif_category(category)
        columns = [
            column(tag.removeprefix(category), [row[number] for row in table])
            for number, tag in enumerate(table.tags)
        ]
        if len(table):
            categories.append({"name": category[:-1], "rowCount": len(table), "columns": columns})
    return packed({
        "version": "0.3.0", "encoder": "test",
        "dataBlocks": [{"header": block.name, "categories": categories}],
    })  # fmt: skip


@pytest.fixture(scope="module")
def text(shared):
    return gzip.decompress((shared / "data/complexes/mmcif/1pfe.cif.gz").read_bytes()).decode()


def test_a_binary_file_is_the_text_file(text):
    expected = parse_structure(text.encode(), "1pfe.cif")
    found = parse_structure(binary(text), "1pfe.bcif")
    for table in ("atoms", "residues", "chains", "links"):
        for each in fields(getattr(expected, table)):
            one, other = (getattr(getattr(x, table), each.name) for x in (expected, found))
            np.testing.assert_array_equal(one, other, f"{table}.{each.name}")
    for name in ("name", "methods", "resolution", "released", "deposited", "models"):
        assert getattr(expected, name) == getattr(found, name)
    assert len(expected.assemblies) == len(found.assemblies) > 0


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_refused(text, part):
    data = binary(text)
    with pytest.raises(DataError, match=r"x\.bcif: is not valid BinaryCIF"):
        parse_structure(data[: int(part * len(data))], "x.bcif")


def test_a_damaged_column_is_named(text):
    data = binary(text).replace(b"IntegerPacking", b"IntegerPackinG")
    with pytest.raises(DataError, match=r"x\.bcif, _\w+\.\w+: is not valid BinaryCIF"):
        parse_structure(data, "x.bcif")
