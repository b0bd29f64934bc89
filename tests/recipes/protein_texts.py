"""Small good files of proteins: a chain as mmCIF or PDB, and the components of its residues."""

import numpy as np

RESIDUES = ("ALA", "GLY", "SER", "ALA", "GLY", "SER", "ALA", "ALA", "GLY", "SER", "GLY", "ALA")
SEQUENCE = "AGSAGSAAGSGA"
SIDE = {"ALA": ("CB",), "GLY": (), "SER": ("CB", "OG")}
BACKBONE = ("N", "CA", "C", "O")


def loop(category, columns):
    """A loop of mmCIF from columns by tag."""
    head = "".join(f"_{category}.{tag}\n" for tag in columns)
    rows = zip(*(map(str, column) for column in columns.values()), strict=True)
    return "loop_\n" + head + "".join(" ".join(row) + "\n" for row in rows) + "#\n"


def atoms_of(residues, chain="A", entity="1"):
    """Columns of atom_site of a stretched chain."""
    rows = [
        (name, code, number)
        for number, code in enumerate(residues, start=1)
        for name in (*BACKBONE, *SIDE[code])
    ]
    place = np.arange(len(rows))
    return {
        "group_PDB": ["ATOM"] * len(rows),
        "id": (place + 1).tolist(),
        "type_symbol": [name[0] for name, _, _ in rows],
        "label_atom_id": [name for name, _, _ in rows],
        "label_alt_id": ["."] * len(rows),
        "label_comp_id": [code for _, code, _ in rows],
        "label_asym_id": [chain] * len(rows),
        "label_entity_id": [entity] * len(rows),
        "label_seq_id": [number for _, _, number in rows],
        "pdbx_PDB_ins_code": ["?"] * len(rows),
        "Cartn_x": (place * 0.9).round(3).tolist(),
        "Cartn_y": (place % 3 * 1.1).round(3).tolist(),
        "Cartn_z": (place % 2 * 1.2).round(3).tolist(),
        "occupancy": ["1.00"] * len(rows),
        "B_iso_or_equiv": ["10.0"] * len(rows),
        "auth_seq_id": [number for _, _, number in rows],
        "auth_asym_id": [chain] * len(rows),
        "pdbx_PDB_model_num": [1] * len(rows),
    }


def tables_of(residues=RESIDUES):
    """All categories of a file of one protein, in two copies."""
    count = len(residues)
    names = {"label_asym_id": "A", "label_comp_id": "ALA", "label_atom_id": "CA"}
    links = {"id": ["c1"], "conn_type_id": ["covale"]}
    for side, number in (("ptnr1", "1"), ("ptnr2", "4")):
        links |= {f"{side}_{tag}": [value] for tag, value in names.items()}
        links |= {f"{side}_label_seq_id": [number], f"{side}_symmetry": ["1_555"]}
    return {
        "entry": {"id": ["GOOD"]},
        "exptl": {"method": ["'X-RAY DIFFRACTION'"]},
        "refine": {"ls_d_res_high": ["1.80"]},
        "pdbx_audit_revision_history": {"ordinal": ["1"], "revision_date": ["2001-02-03"]},
        "entity": {"id": ["1"], "type": ["polymer"]},
        "entity_poly": {"entity_id": ["1"], "type": ["polypeptide(L)"]},
        "entity_poly_seq": {
            "entity_id": ["1"] * count, "num": list(range(1, count + 1)), "mon_id": list(residues)
        },
        "struct_asym": {"id": ["A"], "entity_id": ["1"]},
        "struct_conn": links,
        "pdbx_struct_assembly_gen": {
            "assembly_id": ["1"], "oper_expression": ["1,2"], "asym_id_list": ["A"]
        },
        "pdbx_struct_oper_list": {
            "id": ["1", "2"],
            **{
                f"matrix[{i}][{j}]": ["1.0" if i == j else "0.0"] * 2
                for i in (1, 2, 3)
                for j in (1, 2, 3)
            },
            **{f"vector[{i}]": ["0.0", "40.0"] for i in (1, 2, 3)},
        },
        "atom_site": atoms_of(residues),
    }  # fmt: skip


def cif(changes=None, drop=(), add="", tables=None):
    """Text of the good file with (category, tag, row) replaced; row None for all rows."""
    tables = tables or tables_of()
    for (category, tag, row), value in (changes or {}).items():
        column = tables[category].setdefault(
            tag, ["?"] * len(next(iter(tables[category].values())))
        )
        for place in range(len(column)) if row is None else [row]:
            column[place] = value
    text = "".join(loop(name, columns) for name, columns in tables.items() if name not in drop)
    return f"data_GOOD\n#\n{text}{add}".encode()


def calphas(residues):
    """Text of a chain of which only the CA are known."""
    tables = tables_of(())
    count = len(residues)
    one = atoms_of(("GLY",))
    tables["atom_site"] = {tag: [column[1]] * count for tag, column in one.items()}
    numbers = range(1, count + 1)
    sequence = {"entity_id": ["1"] * count, "num": numbers, "mon_id": residues}
    tables["entity_poly_seq"] = sequence
    tables["atom_site"] |= {"id": numbers, "label_seq_id": numbers, "auth_seq_id": numbers}
    tables["atom_site"]["Cartn_x"] = [f"{3.8 * (i % 20_000):.1f}" for i in numbers]
    del tables["pdbx_struct_assembly_gen"], tables["struct_conn"]
    text = "".join(loop(name, columns) for name, columns in tables.items())
    return f"data_LONG\n#\n{text}".encode()


def component_text(code, bonds=()):
    names = (*BACKBONE, *SIDE[code], "OXT")
    pairs = [("N", "CA"), ("CA", "C"), ("C", "O"), ("C", "OXT")]
    pairs += [("CA", "CB")] * ("CB" in names) + [("CB", "OG")] * ("OG" in names) + list(bonds)
    place = np.arange(len(names))
    atoms = {
        "comp_id": [code] * len(names), "atom_id": names,
        "type_symbol": [name[0] for name in names], "charge": [0] * len(names),
        "pdbx_leaving_atom_flag": ["Y" if name == "OXT" else "N" for name in names],
        "pdbx_aromatic_flag": ["N"] * len(names),
        "pdbx_model_Cartn_x_ideal": (place * 1.2).round(2), "pdbx_model_Cartn_y_ideal": place % 2,
        "pdbx_model_Cartn_z_ideal": place % 3,
    }  # fmt: skip
    bonded = {
        "comp_id": [code] * len(pairs), "atom_id_1": [a for a, _ in pairs],
        "atom_id_2": [b for _, b in pairs], "value_order": ["SING"] * len(pairs),
        "pdbx_aromatic_flag": ["N"] * len(pairs),
    }  # fmt: skip
    kind = {"id": [code], "name": [code], "type": ["'L-PEPTIDE LINKING'"]}
    tables = {"chem_comp": kind, "chem_comp_atom": atoms, "chem_comp_bond": bonded}
    return f"data_{code}\n#\n" + "".join(loop(name, rows) for name, rows in tables.items())


COMPONENTS = "".join(map(component_text, SIDE)).encode()


def pdb(chain="A"):
    """A PDB file of the good protein, with the name of its chain."""
    columns = atoms_of(RESIDUES)
    lines = [
        f"ATOM  {i:5d}  {name:<3s} {code} {chain}{number:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
        f"  1.00 10.00           {symbol}"
        for i, name, code, number, x, y, z, symbol in zip(
            *(columns[tag] for tag in ("id", "label_atom_id", "label_comp_id", "label_seq_id")),
            *(columns[f"Cartn_{axis}"] for axis in "xyz"), columns["type_symbol"], strict=True,
        )
    ]  # fmt: skip
    return ("\n".join([*lines, "TER", "END"]) + "\n").encode()


A3M = "".join(
    f">row{i}_HUMAN\n{SEQUENCE[: i % 5]}{'acd' * (i % 3)}{SEQUENCE[i % 5 :]}\n" for i in range(20)
).encode()
