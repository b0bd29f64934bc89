"""What tests of proteins share."""

import pytest

from bevatron.data.readers.proteins.components import open_components


@pytest.fixture(scope="session")
def dictionary(shared, tmp_path_factory):
    """The components of the shared structures."""
    index = tmp_path_factory.mktemp("components") / "ccd.arrow"
    return open_components(shared / "data/complexes/ccd_subset.cif.gz", index)
