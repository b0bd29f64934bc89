"""The batch of a complex keeps every number when it is padded, and its padding counts nowhere."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from bevatron.data.padding import pad
from bevatron.data.proteins.complex_batch import NO_PAIR, ComplexBatch, collate_complex
from bevatron.errors import DataError

N, A, S, T, M, K, U = 5, 11, 3, 4, 2, 2, 4
FLOATS = {"ref_pos": (A, 3), "ref_charge": (A,), "profile": (N, 32), "deletion_mean": (N,),
          "template_pseudo_beta": (T, N, 3), "template_backbone": (T, N, 3, 3),
          "position": (A, 3), "copy_position": (K, A, 3), "resolution": ()}  # fmt: skip
INTS = {"restype": (N,), "residue_index": (N,), "token_index": (N,), "asym_id": (N,),
        "entity_id": (N,), "sym_id": (N,), "molecule_type": (N,), "ref_element": (A,),
        "ref_atom_name_chars": (A, 4), "ref_space_uid": (A,), "atom_to_token": (A,),
        "centre_atom": (N,), "representative_atom": (N,), "frame_atoms": (N, 3),
        "token_bonds": (6, 2), "polymer_ligand_bonds": (1, 2), "molecule": (N,),
        "molecule_entity": (M,), "molecule_copies": (M,), "molecule_copy": (M,),
        "permutation_ptr": (U + 1,), "permutation_atoms": (8,)}  # fmt: skip
FLAGS = {"token_mask": (N,), "ref_mask": (A,), "atom_mask": (A,), "msa_mask": (S, N),
         "template_pseudo_beta_mask": (T, N), "template_backbone_mask": (T, N),
         "resolved": (A,), "copy_resolved": (K, A), "has_frame": (N,)}  # fmt: skip
BYTES = {"msa": (S, N), "deletion": (S, N), "template_restype": (T, N)}


class Random:
    types: ClassVar = {"msa": np.int8, "deletion": np.uint8, "template_restype": np.int8}

    @classmethod
    def sample(cls, seed=0):
        rng = np.random.default_rng(seed)
        found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in FLOATS.items()}
        found |= {name: rng.integers(0, 4, shape) for name, shape in INTS.items()}
        found |= {name: np.ones(shape, dtype=np.bool_) for name, shape in FLAGS.items()}
        found |= {n: rng.integers(0, 30, s).astype(cls.types[n]) for n, s in BYTES.items()}
        found["atom_to_token"] = np.sort(rng.integers(0, N, A))
        found["permutation_ptr"] = np.array([0, 0, 4, 8, 8])
        return found


def batch():
    return collate_complex([Random.sample()], np.array([7]), [1.0])


def test_every_field_of_the_sample_is_in_the_batch_and_counted():
    made = batch()
    assert set(made.ragged) == {*FLOATS, *INTS, *FLAGS, *BYTES, "seed", "weight"}
    assert made.sizes["tokens"], made.sizes["rows"] == (N, S)
    assert set(made.padding.names) == set(made.sizes)
    assert made.sample_indices.tolist() == [7]


def test_long_crops_are_padded_by_a_sixteenth_of_their_tokens_at_most():
    made = batch()
    for tokens in range(1024, 4097):
        sizes = {**made.sizes, "tokens": tokens}
        padded = made.padding.rounded(made.padding.size_of(sizes)).tokens
        assert tokens <= padded <= tokens * 17 / 16
    assert made.padding.rounded(made.padding.size_of({**made.sizes, "tokens": 2176})).tokens == 2176


def test_padding_keeps_what_is_real_and_is_masked():
    made = batch()
    shape = made.padding.rounded(made.padding.size_of(made.sizes))
    padded = pad(made, shape)
    for name, value in made.tensors().items():
        inside = tuple(map(slice, value.shape))
        assert torch.equal(getattr(padded, name)[inside], value), name
    assert padded.sizes["tokens"] == shape.tokens > N
    for name, shape_ in FLAGS.items():
        assert int(getattr(padded, name).sum()) == np.prod(shape_), name
    assert (padded.token_bonds[6:] == NO_PAIR).all()
    assert (padded.permutation_ptr[U:] == 8).all()
    assert (padded.atom_to_token.diff() >= 0).all()
    assert not padded.molecule_copies[M:].any()
    assert isinstance(padded, ComplexBatch)


def test_a_batch_of_two_is_refused_with_what_to_do():
    with pytest.raises(DataError, match="a batch of proteins is one sample"):
        collate_complex([Random.sample()] * 2, np.array([0, 1]), [1.0, 1.0])
