"""Asynchronous saves of Megatron-core and NVRx (NVIDIA's resiliency extension), written by Penstock: a replacement of
their `FileSystemWriterAsync`, which imports neither.

The schedulers of both libraries save in phases, and call a storage writer in each:

    plan:      `prepare_local_plan`, then `prepare_global_plan` or, without rank 0, `prepare_decentralized_global_plan`
    stage:     `prepare_write_data`, on the thread that trains
    write:     the function of `get_save_function_and_args`, in a process of the scheduler, forked or spawned
    finalize:  `retrieve_write_results` on each rank, gathered, and `finish` on rank 0

Staging copies everything to shared memory in the layout of the files (staging.py), so the training may then change
every tensor, and the writing process needs no CUDA. It puts its result into the same memory, not into a queue, where a
message of an earlier save could be read by mistake. A process that is killed leaves no result, which counts as a
failure at once."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import reduction
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from penstock.client.checkpoint.saving.planning import Key, LocalItem, RankLayout, lay_out
from penstock.client.checkpoint.saving.staging import SharedImage, StagingBuffer
from penstock.client.checkpoint.storage import AsyncFileSystemWriter
from penstock.client.checkpoint.values.torch_frames import compact, is_plain, saved_bytes
from penstock.client.checkpoint.values.torch_private import StorageInfo, StoragePrefix, wrap_exception
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.proto.state.checkpoint_files import METADATA
from penstock.runtime.files.direct_files import write_file

__all__ = ["FileSystemWriterAsync"]

_log = logging.getLogger("penstock.checkpoint")

VERDICT = 8192
"""Bytes of shared memory for the writing process's result."""
LENGTH = 8


class FileSystemWriterAsync(AsyncFileSystemWriter):
    """Storage writer for the schedulers of Megatron-core and NVRx, with the methods of the writers in these libraries.

    Create a writer for each save::

        writer = FileSystemWriterAsync(folder, thread_count=2)
        planned = save_state_dict_async_plan(state, writer, planner=planner)
        save_fn, preload_fn, save_args = writer.get_save_function_and_args()
        request = AsyncRequest(save_fn, save_args, [finalize], preload_fn=preload_fn)
        queue.schedule_async_request(request)

    Args:
        path: folder of this checkpoint.
        single_file_per_rank: must be True. Each rank writes up to `thread_count` files, as with Megatron-core's writer.
        sync_files: True: fsync all files before a save is complete.
        thread_count: largest number of files of each rank. Each file is written by a thread.
        separation_hint: prefix of the names of values that are saved in up to `thread_count` separate files.
        use_msc: must be False, because NVIDIA's multi-storage client is not supported.
        overwrite: False: raise an error if the folder contains a checkpoint.
        open_file: a function like `open` with which the writing process opens each file for writing; a spawned one
            gets it pickled. None: the files are written without the kernel's page cache where that is possible.
        is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors: accepted, because Megatron-core and
            NVRx pass them, but without effect, which the log says once: everything is always copied to shared memory
            and written by threads.

    Attributes:
        write_buckets: the files in shared memory, len() of them; None before `prepare_write_data`.
        results_queue: None, because the result is in shared memory."""

    can_run_decentralized_global_plan = True
    results_queue = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        *,
        separation_hint: str | None = None,
        use_msc: bool = False,
        overwrite: bool = True,
        open_file: Callable[..., Any] | None = None,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
    ) -> None:
        if use_msc or not single_file_per_rank:
            wrong = "use_msc=True" if use_msc else "single_file_per_rank=False"
            raise InvalidArgumentError(f"FileSystemWriterAsync({wrong}) is not supported: leave this argument out")
        super().__init__(
            path,
            sync_files=sync_files,
            thread_count=thread_count,
            separation_hint=separation_hint,
            overwrite=overwrite,
        )
        unused = {
            "is_multiproc_io": is_multiproc_io,
            "use_cached_data_structure": use_cached_data_structure,
            "use_cpu_shm_for_gpu_tensors": use_cpu_shm_for_gpu_tensors,
        }
        _say_unused(", ".join(name for name, value in unused.items() if value))
        self.checkpoint_dir = path
        self.open_file = open_file
        self.write_buckets: StagedFiles | None = None
        self._buffer: StagingBuffer | None = None
        """Memory that the writing process reads from, until it has ended."""
        self._failure = ""
        self._stored: list[tuple[MetadataIndex, StorageInfo]] = []

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return this rank's part of the global plan, made from `local_plan` alone: file names contain the rank."""
        return dataclasses.replace(local_plan, storage_data=StoragePrefix(f"__{_rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy all values of this rank's plan to shared memory, so that the training may change them again."""
        Path(self.path, METADATA).unlink(missing_ok=True)  # an overwritten checkpoint's, which becomes invalid here
        how = str(self.path), self.sync_files, self.open_file
        self.write_buckets, self._stored = StagedFiles(None, [], 0, *how), []
        if not plan.items:
            return
        values: dict[Key, torch.Tensor] = {}
        objects: dict[Key, bytes] = {}
        items = [_resolved(item, planner, values, objects) for item in plan.items]
        layout = lay_out(items, plan.storage_data.prefix, self.thread_count, self.separation_hint)
        self._buffer = _free_buffers.pop() if _free_buffers else StagingBuffer()
        files, (verdict, _) = self._buffer.stage(layout, objects, b"\0" * VERDICT, lambda one: values[one.key])
        sizes = [(name, start, size) for name, start, size, _ in files]
        self._stored = _stored(layout, {key: len(data) for key, data in objects.items()})
        self.write_buckets = StagedFiles(self._buffer.image, sizes, verdict, *how)
        # a scheduler that is aborted forgets a save, and would leave its memory allocated
        self._forgotten = weakref.finalize(self.write_buckets, self._buffer.close)

    def get_save_function_and_args(self) -> tuple[Callable[..., None] | None, Callable[..., Any] | None, list[Any]]:
        """Return the function that writes the files, None in place of a function that preloads, and the first one's
        arguments; (None, None, []) without anything to write. It may be called in another process, forked or
        spawned."""
        if not self.write_buckets:
            return None, None, []
        return write_staged, None, [_rank(), self.write_buckets, None]

    @staticmethod
    def preload_tensors(write_buckets: StagedFiles, non_blocking: bool = True) -> StagedFiles:
        """Return `write_buckets` unchanged, because `prepare_write_data` has copied all tensors already."""
        return write_buckets

    @staticmethod
    def register_shm_drain_callback(fn: Callable[[], None] | None) -> None:
        """Without effect: NVRx's queue would have its writer wait before memory is reused that may still be read, but
        here no save gets the memory of one that has not ended."""

    def retrieve_write_results(self) -> list[WriteResult] | tuple[BaseException, Any]:
        """Return the results of this rank's items, or its error as torch sends one to other ranks. Call this after the
        writing function has returned, or its process has ended."""
        if self.write_buckets is None:
            raise CheckpointError("retrieve_write_results() must be called after prepare_write_data()")
        if self._buffer is not None:
            self._forgotten.detach()
            error = self.write_buckets.error()
            if error is None:  # the process may still be writing, so its memory must not be reused
                self._failure = "left no result: it was killed, or still runs. Save again after its end"
                self._buffer.close()
            else:
                self._failure = error and f"failed: {error}. Save again"
                _free_buffers.append(self._buffer)
            self._buffer = None
        if self._failure:
            failed = CheckpointError(f"rank {_rank()}: the process that writes {self.path} {self._failure}")
            return cast(tuple[BaseException, Any], wrap_exception(failed))
        return [WriteResult(index, info.length, info) for index, info in self._stored]


class StagedFiles:
    """Files of a save in shared memory, picklable for the process that writes them. `image`: None without files.
    `files`: name, offset and length in bytes. `verdict`: offset of the result. `durable`: sync the files. `open_file`:
    None: Penstock's own way of writing."""

    def __init__(
        self,
        image: SharedImage | None,
        files: list[tuple[str, int, int]],
        verdict: int,
        folder: str,
        durable: bool,
        open_file: Callable[..., Any] | None,
    ) -> None:
        self._image = image
        self.files = files
        self._verdict = verdict
        self._folder = folder
        self._durable = durable
        self._open_file = open_file
        self._received = False

    def __len__(self) -> int:
        return len(self.files)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the memory's descriptor to a spawned process, not its contents."""
        assert self._image is not None
        handle = reduction.DupFd(self._image.fd)
        how = self._folder, self._durable, self._open_file
        return _received, (handle, self._image.nbytes, self.files, self._verdict, *how)

    def write(self) -> None:
        """Write the files, then put the result (the text of an error, "" for success) into the memory."""
        assert self._image is not None
        region = memoryview(self._image.map)
        error = ""
        try:
            with ThreadPoolExecutor(len(self.files), thread_name_prefix="penstock-write") as pool:
                tasks = [pool.submit(self._write_one, region[start:], name, size) for name, start, size in self.files]
                for task in tasks:
                    task.result()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        # its length last, by which the training process recognises it
        text = error.encode()[: VERDICT - LENGTH]
        self._image.put(self._verdict + LENGTH, text)
        self._image.put(self._verdict, (len(text) + 1).to_bytes(LENGTH))

    def _write_one(self, region: memoryview, name: str, size: int) -> None:
        path = Path(self._folder, name)
        path.unlink(missing_ok=True)
        if self._open_file is None:
            write_file(path, region, size, durable=self._durable, passing=lambda _: None)
            return
        with self._open_file(str(path), "wb") as file:
            file.write(region[:size])
            if self._durable:
                file.flush()
                os.fsync(file.fileno())

    def close(self) -> None:
        if self._received and self._image is not None:
            self._image.close()

    def error(self) -> str | None:
        """Return the writing process's error; "" for success, None without a result yet."""
        assert self._image is not None
        begin = self._verdict + LENGTH
        length = int.from_bytes(self._image.map[self._verdict : begin])
        return self._image.map[begin : begin + length - 1].decode(errors="replace") if length else None


def write_staged(rank: int, staged: StagedFiles, results_queue: None) -> None:
    """Write the files in a process of the scheduler. `retrieve_write_results` reports an error."""
    staged.write()
    staged.close()


def _received(handle: Any, nbytes: int, *rest: Any) -> StagedFiles:
    staged = StagedFiles(SharedImage.received(handle.detach(), nbytes), *rest)
    staged._received = True
    return staged


_free_buffers: list[StagingBuffer] = []
"""Shared memory that earlier saves released: allocating takes longer than copying into it."""


def _resolved(
    item: WriteItem, planner: SavePlanner, values: dict[Key, torch.Tensor], objects: dict[Key, bytes]
) -> LocalItem:
    """Return Penstock's item. Put a plain tensor into `values`, else torch.save's bytes into `objects`."""
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor) and data.is_cuda and "dequantize" in type(data).__dict__:
        data = data.dequantize()  # Transformer Engine's, as their writers do: their readers refuse its own type
    framed = isinstance(data, torch.Tensor) and is_plain(data) and _fits(item, data)
    local = LocalItem.of(item, framed)
    if item.type is WriteItemType.BYTE_IO:
        objects[local.key] = cast(Any, data).getvalue()
    elif framed:
        values[local.key] = cast(torch.Tensor, data)
    else:
        objects[local.key] = saved_bytes(compact(cast(torch.Tensor, data)))
    return local


def _fits(item: WriteItem, data: torch.Tensor) -> bool:
    planned = item.tensor_data
    return planned is not None and data.dtype == planned.properties.dtype and data.shape == planned.chunk.sizes


@cache
def _say_unused(names: str) -> None:
    if names:
        _log.info("FileSystemWriterAsync: %s: without effect here", names)


def _stored(layout: RankLayout, lengths: dict[Key, int]) -> list[tuple[MetadataIndex, StorageInfo]]:
    return [
        (MetadataIndex(*key, hint), StorageInfo(file.name, offset, length))
        for file in layout
        for key, hint, offset, length in file.stored(lengths)
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
