"""Templates in a file are those that were written."""

import pickle

import numpy as np
import pytest

from bevatron.data.proteins.template_file import TemplateFile, write_templates
from bevatron.data.proteins.templates import Templates
from bevatron.errors import DataError


def drawn(rng, number, length):
    return Templates(
        restype=rng.integers(0, 32, (number, length)).astype(np.int8),
        pseudo_beta=rng.standard_normal((number, length, 3)).astype(np.float32),
        pseudo_beta_mask=rng.random((number, length)) < 0.5,
        backbone=rng.standard_normal((number, length, 3, 3)).astype(np.float32),
        backbone_mask=rng.random((number, length)) < 0.5,
    )


def test_a_file_gives_what_was_written(tmp_path):
    rng = np.random.default_rng(0)
    written = {bytes([i]) * 16: drawn(rng, i % 5, 3 + i) for i in range(150)}
    write_templates(iter(written.items()), tmp_path / "templates.arrow")
    found = TemplateFile(tmp_path / "templates.arrow")
    assert (len(found), list(found)) == (150, list(written))
    again = pickle.loads(pickle.dumps(found))
    for key, templates in written.items():
        for name, values in vars(templates).items():
            read = getattr(found[key], name)
            if len(values):
                np.testing.assert_array_equal(read, values, name)
            assert (read.dtype, len(read)) == (values.dtype, len(values))
            np.testing.assert_array_equal(getattr(again[key], name), read)
    assert b"none" not in found


def test_an_empty_file_has_no_templates(tmp_path):
    write_templates([], tmp_path / "templates.arrow")
    assert not len(TemplateFile(tmp_path / "templates.arrow"))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "templates.arrow").write_bytes(b"ARROW1 not")
    with pytest.raises(DataError, match=r"templates\.arrow: is no file of templates"):
        TemplateFile(tmp_path / "templates.arrow")
