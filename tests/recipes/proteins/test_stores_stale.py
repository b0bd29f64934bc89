"""Stores of proteins say when they are of other content or of other code than asked for."""

import numpy as np
import protein_texts as proteins
import pytest

from bevatron.data.proteins import alignments
from bevatron.data.proteins.alignments import Alignments
from bevatron.data.store.store import Store
from bevatron.errors import DataError, StoreError
from bevatron.recipes.alphafold2 import stores as chains
from bevatron.recipes.alphafold3 import stores as complexes


@pytest.fixture(params=[complexes, chains], ids=["alphafold3", "alphafold2"])
def system(request):
    return request.param


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A protein, its alignment, and a dictionary."""
    monkeypatch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    root = tmp_path / "files"
    root.mkdir()
    (root / "a.cif").write_bytes(proteins.cif())
    (root / "a.a3m").write_bytes(proteins.A3M)
    (tmp_path / "components.cif").write_bytes(proteins.COMPONENTS)
    return root


def prepare(system, folder, **options):
    out, options = folder.parent / "s", {"workers": 0, "progress": False} | options
    if system is complexes:
        components = str(folder.parent / "components.cif")
        system.prepare_complexes([folder], out, components=components, **options)
    else:
        system.prepare_chains([folder], out, **options)
    return out


def opened(system, out):
    return (system.open_complexes if system is complexes else system.open_chains)(out)


def test_features_of_another_version_are_refused_by_both(system, folder, monkeypatch):
    out = prepare(system, folder)
    kind = complexes.COMPLEXES if system is complexes else chains.CHAINS
    monkeypatch.setattr(kind, "version", kind.version + 1)
    with pytest.raises(DataError, match=r"has version \d of the features, the code has version \d"):
        opened(system, out)
    with pytest.raises(
        StoreError, match=r"features are of version \d, this release makes version \d"
    ):
        prepare(system, folder)
    prepare(system, folder, overwrite=True)
    opened(system, out)


def test_alignments_of_another_version_are_refused(system, folder, monkeypatch):
    out = prepare(system, folder)
    monkeypatch.setattr(alignments, "ALIGNMENTS_VERSION", 3)
    with pytest.raises(DataError, match="alignments: has version 2 of the features"):
        Alignments.open(out / "alignments")
    with pytest.raises(StoreError, match=r"alignments: .* version 2, this release makes version 3"):
        prepare(system, folder)
    prepare(system, folder, overwrite=True)
    Alignments.open(out / "alignments")


@pytest.mark.parametrize("name", ["a.cif", "a.a3m"])
def test_other_content_is_refused_and_overwritten_if_asked(system, folder, name):
    out = prepare(system, folder)
    before = opened(system, out)[0]
    (folder / name).write_bytes((folder / name).read_bytes().replace(b"SER", b"ALA") + b"\n\n")
    with pytest.raises(StoreError, match="content of the input files"):
        prepare(system, folder)
    after = opened(system, prepare(system, folder, overwrite=True))[0]
    field = "restype" if system is complexes else "aatype"
    assert np.array_equal(before[field], after[field]) == (name == "a.a3m")


def test_without_alignments_old_ones_are_removed(system, folder):
    out = prepare(system, folder)
    (folder / "a.a3m").unlink()
    prepare(system, folder, overwrite=True)
    assert not (out / "alignments").exists()


def test_alignments_that_are_kept_are_told(folder):
    out = folder.parent / "s"
    chains.prepare_chains([folder], out, workers=0, progress=False)
    (folder / "a.a3m").unlink()
    for overwrite, kept in (
        (False, "; the alignments that the store has are kept, --overwrite removes them"),
        (True, ""),
    ):
        told = chains.prepare_chains([folder], out, workers=0, progress=False, overwrite=overwrite)
        assert f"alignment files: 0{kept}" in told
        assert "template hit files: 0" in told


def test_another_dictionary_under_the_same_name_is_refused(folder):
    prepare(complexes, folder)
    other = proteins.COMPONENTS.replace(b" 0 N N", b" 1 N N", 1)
    (folder.parent / "components.cif").write_bytes(other)
    with pytest.raises(StoreError, match="dictionary was"):
        prepare(complexes, folder)


def test_a_store_that_is_being_overwritten_is_not_opened(system, folder, monkeypatch):
    out = prepare(system, folder)
    (folder / "a.a3m").write_bytes(proteins.A3M + b"\n")

    def stopped(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bevatron.recipes.proteins.stores.prepare_searches", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(system, folder, overwrite=True)
    with pytest.raises(DataError, match="was not prepared completely"):
        opened(system, out)


def test_a_flipped_byte_of_an_entry_or_the_manifest_is_named(system, folder):
    out = prepare(system, folder)
    shard, manifest = out / "shard-000000.arrow", out / "manifest.json"
    whole = opened(system, out)[0]
    values = whole["position" if system is complexes else "all_atom_positions"].tobytes()
    content = bytearray(shard.read_bytes())
    content[content.index(values) + 9] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        StoreError, match=r"shard-000000.arrow: sample 0 \(.*a.cif, file 0\) is dam"
    ):
        opened(system, out)[0]
    manifest.write_text(manifest.read_text().replace('"num_samples": 1', '"num_samples": 0'))
    with pytest.raises(StoreError, match=r"manifest.json: is damaged, its checksum"):
        Store.open(out)
    shard.unlink()
    prepare(system, folder)
    assert len(opened(system, out)) == 1
