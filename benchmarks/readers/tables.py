"""Tables of Delta Lake and Iceberg, by deltalake's query engine and pyiceberg's scan, and Penstock over the same ones.

A table is written in commits, each with rows more than the samples, which a last commit deletes. Both libraries then
rewrite files; vectors of deleted rows, which neither writes, are measured by benchmarks/tables.py. Neither shuffles.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import BatchReader, all_samples, value_column
from benchmarks.streaming_data import BATCH

from penstock.data import index_table

__all__ = ["OursTable", "TheirsDelta", "TheirsIceberg"]

COMMITS = 4


class _Theirs(BatchReader):
    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        column = value_column(kind)
        for batch in _batches(self.parts(folder)):
            values: Any = batch.column(column)
            if column == "tokens":
                flat = values.combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.int32)
                values = torch.from_numpy(flat.reshape(len(values), -1))
            else:
                values = values.to_pylist()
            yield {"number": torch.from_numpy(batch.column("number").to_numpy().copy()), column: values}

    def parts(self, folder: str) -> Iterator[Any]:
        """Yield the table's record batches."""
        raise NotImplementedError


def _batches(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield tables of BATCH rows each; the last may have fewer."""
    rest: Any = None
    for part in parts:
        rows = pyarrow.Table.from_batches([part])
        rows = rows if rest is None else pyarrow.concat_tables([rest, rows])
        whole = rows.num_rows // BATCH * BATCH
        yield from (rows.slice(begin, BATCH) for begin in range(0, whole, BATCH))
        rest = rows.slice(whole)
    if rest is not None and rest.num_rows:
        yield rest


class TheirsDelta(_Theirs):
    packages = ("deltalake", "pyarrow", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        library = importlib.import_module("deltalake")
        for part in _parts(kind, samples):
            library.write_deltalake(folder, part, mode="append")
        library.DeltaTable(folder).delete("number < 0")

    def parts(self, folder: str) -> Iterator[Any]:
        library = importlib.import_module("deltalake")
        engine = library.QueryBuilder().register("rows", library.DeltaTable(folder))
        for part in engine.execute("select * from rows"):
            yield pyarrow.record_batch(part)


class TheirsIceberg(_Theirs):
    packages = ("pyiceberg", "pyarrow", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        memory = importlib.import_module("pyiceberg.catalog.memory")
        catalog = memory.InMemoryCatalog("readers", warehouse=folder)
        catalog.create_namespace("a")
        table: Any = None
        for part in _parts(kind, samples):
            table = table or catalog.create_table("a.b", part.schema, location=folder)
            table.append(part)
        table.delete("number < 0")

    def parts(self, folder: str) -> Iterator[Any]:
        table = importlib.import_module("pyiceberg.table").StaticTable
        newest = max(Path(folder, "metadata").glob("*.metadata.json"))
        yield from table.from_metadata(str(newest)).scan().to_arrow_batch_reader()


def _parts(kind: str, samples: int) -> Iterator[Any]:
    """Yield the samples in parts, each with some more rows, whose numbers are negative."""
    column = value_column(kind)
    type_of = pyarrow.list_(pyarrow.int32()) if column == "tokens" else pyarrow.binary()
    schema = pyarrow.schema([("number", pyarrow.int64()), (column, type_of)])
    found = list(all_samples(kind, samples))
    for part in np.array_split(np.arange(samples), COMMITS):
        rows = [found[number] for number in part.tolist()]
        rows += [{**row, "number": -1 - row["number"]} for row in rows[::10]]
        columns = {name: pyarrow.array([row[name] for row in rows], schema.field(name).type) for name in schema.names}
        yield pyarrow.table(columns, schema)


class OursTable(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        index_table(folder)
