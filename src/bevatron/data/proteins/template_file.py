"""Templates of many sequences in one file, looked up by the key of a sequence."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bevatron.data.proteins.templates import Templates
from bevatron.errors import DataError
from bevatron.files import atomic_write

FORMAT = b"bevatron templates 1"

_PER_BATCH = 64
_COLUMNS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "restype": (np.int8, ()),
    "pseudo_beta": (np.float32, (3,)),
    "pseudo_beta_mask": (np.uint8, ()),
    "backbone": (np.float32, (3, 3)),
    "backbone_mask": (np.uint8, ()),
}
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("number", pa.int64()),
        *(
            pa.field(name, pa.large_list(pa.from_numpy_dtype(dtype)))
            for name, (dtype, _) in _COLUMNS.items()
        ),
    ],
    metadata={b"format": FORMAT},
)


def write_templates(found: Iterable[tuple[bytes, Templates]], path: str | Path) -> None:
    """Write templates; the file appears under its name only when complete.

    Parameters
    ----------
    found
        `sequence_key` and templates of each sequence; not all are held at once.
    path
        The file.

    Raises
    ------
    DataError
        If it cannot be written.
    """
    with (
        atomic_write(Path(path), DataError) as file,
        pa.ipc.new_file(file, _SCHEMA) as writer,
    ):
        rest = iter(found)
        while rows := tuple(islice(rest, _PER_BATCH)):
            writer.write_batch(_batch(rows))


def _batch(rows: tuple[tuple[bytes, Templates], ...]) -> Any:
    templates = [one for _, one in rows]
    columns = [
        pa.array([key for key, _ in rows], pa.binary()),
        pa.array([len(one.restype) for one in templates], pa.int64()),
    ]
    for name, (dtype, _) in _COLUMNS.items():
        flat = [np.ravel(getattr(one, name)).astype(dtype) for one in templates]
        ends = np.concatenate([[0], np.cumsum([len(values) for values in flat])])
        columns.append(
            pa.LargeListArray.from_arrays(pa.array(ends.astype(np.int64)), np.concatenate(flat))
        )
    return pa.record_batch(columns, schema=_SCHEMA)


class TemplateFile(Mapping[bytes, Templates]):
    """The templates of a file, by `sequence_key`; memory-mapped. Pickles as its path.

    Parameters
    ----------
    path
        What `write_templates` wrote.

    Raises
    ------
    DataError
        If it is no such file, or is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            known = (reader.schema.metadata or {}).get(b"format") == FORMAT
            batches = range(reader.num_record_batches if known else 0)
            self._batches = [reader.get_batch(number) for number in batches]
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(
                f"{path}: is no file of templates, or it is damaged ({error})"
            ) from None
        if not known:
            raise DataError(f"{path}: is no file of templates of this version; write it anew")
        self._rows = {
            key: (number, row)
            for number, batch in enumerate(self._batches)
            for row, key in enumerate(batch.column("key").to_pylist())
        }

    def __reduce__(self) -> tuple[type["TemplateFile"], tuple[Path]]:
        return TemplateFile, (self.path,)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._rows)

    def __getitem__(self, key: bytes) -> Templates:
        number, row = self._rows[key]
        batch = self._batches[number]
        templates = batch.column("number")[row].as_py()
        found: dict[str, Any] = {}
        for name, (_, shape) in _COLUMNS.items():
            values = batch.column(name)[row].values.to_numpy(zero_copy_only=True)
            size = max(templates * int(np.prod(shape, dtype=np.int64)), 1)
            found[name] = values.reshape(templates, len(values) // size, *shape)
            if name.endswith("_mask"):
                found[name] = found[name].view(np.bool_)
        return Templates(**found)
