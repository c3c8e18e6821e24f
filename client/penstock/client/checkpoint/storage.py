"""`AsyncFileSystemWriter`: a storage writer for `torch.distributed.checkpoint.save` and `async_save`.

    dcp.save(state, storage_writer=AsyncFileSystemWriter(path))

Unlike with torch's FileSystemWriter, files get nearly equal lengths, computed from the parts that are saved; the
failure of a thread fails the save; with sync_files=True, the index is on the disk before it is renamed. torch's own
reader reads the result. Files are written in the thread or process in which torch calls; for a separate process use
AsyncCheckpointer."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import IOBase
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.client.checkpoint.saving.planning import DCP_VERSION, Bucket, Item, assign
from penstock.client.checkpoint.values.torch_frames import compact
from penstock.client.checkpoint.values.torch_private import write_item
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.proto.state.checkpoint_files import METADATA
from penstock.runtime.files.atomic_files import sync_folder, write_whole


class AsyncFileSystemWriter(FileSystemWriter):
    """Storage writer for torch.distributed.checkpoint that writes a checkpoint's files into a folder, in threads.

    Args:
        path: folder of the checkpoint; created if missing.
        thread_count: number of writing threads on each rank, and largest number of files (twice with separation_hint).
        separation_hint: prefix of the names of values that are saved in separate files. None: all share the files.
        sync_files: True: fsync all files before the save ends.
        overwrite: False: raise an error if the folder holds a checkpoint. True: replace that checkpoint.
        transforms: torch's stream extensions, such as ZStandard for compression, applied to everything that is written.

    If threads fail, `dcp.save` raises the error of one of them; if fewer items were written than planned,
    CheckpointError. Both are wrapped in torch's CheckpointException. Raises InvalidArgumentError if thread_count is not
    an int >= 1."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int = 2,
        separation_hint: str | None = None,
        sync_files: bool = True,
        overwrite: bool = True,
        transforms: Sequence[Any] | None = None,
    ) -> None:
        if not isinstance(thread_count, int) or thread_count < 1:
            raise InvalidArgumentError(f"AsyncFileSystemWriter: thread_count must be an int >= 1, got {thread_count!r}")
        super().__init__(
            path, sync_files=sync_files, thread_count=thread_count, overwrite=overwrite, _extensions=transforms
        )
        self.separation_hint = separation_hint

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files as `plan` says. Return a future with the results, which is done already."""
        items = [Item(item.index.fqn, _chunk_bytes(item)) for item in plan.items]
        buckets = assign(items, plan.storage_data.prefix, self.thread_count, self.separation_hint)
        results: list[WriteResult] = []
        if buckets:
            with ThreadPoolExecutor(self.thread_count, thread_name_prefix="penstock-write") as pool:
                tasks = [pool.submit(self._write_file, bucket, plan.items, planner) for bucket in buckets]
                for task in tasks:
                    results += task.result()
        if len(results) != len(plan.items):
            raise CheckpointError(
                f"{self.path}: only {len(results)} of {len(plan.items)} tensors and objects were written: save again"
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, bucket: Bucket, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        path = Path(self.path) / bucket.name
        path.unlink(missing_ok=True)  # an existing link of that name may lead to any file
        with path.open("xb") as file:
            for item in (items[index] for index in bucket.items):
                results.append(self._write_one(cast(IOBase, file), item, planner, bucket.name))
            file.flush()
            if self.sync_files:
                os.fsync(file.fileno())
        return results

    def _write_one(self, file: IOBase, item: WriteItem, planner: SavePlanner, name: str) -> WriteResult:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            data = compact(data)
        return write_item(self.transforms, file, data, item, name, SerializationFormat.TORCH_SAVE)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's index, which makes the checkpoint complete, as the last file."""
        metadata.version = DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        folder = Path(self.path)
        alone = not getattr(self, "use_collectives", True)  # torch 2.9 and newer: each rank writes an index
        name = f"__{self.rank}{METADATA}" if alone and self.rank is not None else METADATA
        write_whole(folder / name, pickle.dumps(metadata), sync=self.sync_files)
        if self.sync_files:
            with suppress(OSError):  # another user may own the folder; its name is then as durable as before
                sync_folder(folder.parent)


def _chunk_bytes(item: WriteItem) -> int | None:
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return None
    nbytes = item.tensor_data.properties.dtype.itemsize
    for size in item.tensor_data.chunk.sizes:
        nbytes *= size
    return nbytes
