"""The file that lists what the preparation of a store left out."""

import numpy as np

from bevatron.data.samples import Field
from bevatron.data.store.prepare import write_store
from bevatron.data.store.shards import concatenate
from bevatron.recipes.rejects import list_rejects, rejects_file


def test_the_list_is_written_again_and_removed_when_nothing_is_left_out(tmp_path):
    fields = [Field("x", "int64")]
    store = write_store(tmp_path / "store", fields, [concatenate([{"x": np.array(1)}], fields)])
    path = rejects_file(store)
    assert path == tmp_path / "store-rejects.csv"
    list_rejects(store, ("file", "reason"), [("a.cif", "is empty"), ("b.cif", "is cut off")])
    list_rejects(store, ("file", "reason"), [("a.cif", "is empty")])
    assert path.read_text().split() == ["file,reason", "a.cif,is", "empty"]
    list_rejects(store, ("file", "reason"), [])
    assert not path.exists()
