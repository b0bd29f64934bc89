"""From a structure and an alignment on disk to gradients of the loss."""

import gzip
import math
import re
from pathlib import Path

import numpy as np
import torch

from bevatron.data.proteins.chain_batch import collate_chain
from bevatron.data.proteins.chain_samples import ChainSizes, sample_chain
from bevatron.data.proteins.chains import chain_entry
from bevatron.data.proteins.rows_in_memory import rows_in_memory
from bevatron.data.proteins.template_atoms import chain_templates
from bevatron.data.readers.proteins import parse_hits, read_alignment, read_structure
from bevatron.models import alphafold2
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.inputs import model_inputs, reference_inputs
from bevatron.models.alphafold2.losses import LossWeights, loss_terms
from bevatron.models.alphafold2.model import AlphaFold2

WEIGHTS = LossWeights(experimentally_resolved=0.01, violation=1.0)


def chain(shared):
    """1d66 A, nine of whose residues are unresolved, with itself shifted by one as a template."""
    structure = read_structure(shared / "data/proteins/mmcif/1d66.cif.gz")
    number = int(np.flatnonzero(structure.chains.author == "A")[0])
    hit = "q\t1d66_A\t0.9\t60\t0\t0\t2\t61\t1\t60\t1e-9\t70\t60M\n"
    hits = parse_hits(hit.encode(), "hits.m8", "m8")
    sequence = structure.sequence(number)
    templates = chain_templates(sequence, hits, lambda code: structure)
    path = shared / "data/proteins/msa/1d66_A/pool_mmseqs2.a3m.gz"
    return {**chain_entry(structure, number), **templates}, rows_in_memory([read_alignment(path)])


def test_a_chain_with_missing_residues_and_a_template_has_finite_gradients(shared):
    entry, alignment = chain(shared)
    sizes = ChainSizes(residues=24, msa_rows=4, extra_rows=4, templates=2)
    seeds = range(10)
    samples = [sample_chain(entry, alignment, seed, sizes, cycles=2) for seed in seeds]
    sample = next(s for s in samples if s["template_mask"].any() and s["bert_mask"][1].any())
    model = AlphaFold2(AlphaFold2Config.preset("small"))
    given = collate_chain([sample], np.zeros(1, dtype=np.int64), [1.0]).tensors()
    found = model([model_inputs(given, cycle) for cycle in (0, 1)])
    terms = loss_terms(found, reference_inputs(given, 1), WEIGHTS)
    # An untrained model predicts all classes alike.
    scale = math.sqrt(24)
    assert abs(terms["masked_msa"] - 2.0 * scale * math.log(23)) < 1e-3
    assert abs(terms["distogram"] - 0.3 * scale * math.log(64)) < 1e-3
    sum(terms.values()).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name


def test_python_of_the_readme_runs(shared, tmp_path, monkeypatch):
    page = Path(alphafold2.__file__).with_name("README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    files = {"1crn.cif": "mmcif/1crn.cif.gz", "1crn.a3m": "msa/1crn_A/pool_mmseqs2.a3m.gz"}
    for name, compressed in files.items():
        Path(name).write_bytes(
            gzip.decompress((shared / "data/proteins" / compressed).read_bytes())
        )
    seen = {}
    exec(compile("".join(blocks), "README.md", "exec"), seen)
    position = seen["outputs"]["final_atom_positions"]
    assert seen["found"].position.shape == position.shape == (46, 37, 3)
    assert torch.isfinite(position).all()
