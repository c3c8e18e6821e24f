"""Arguments and attributes of classes that users move from, and of ours that are gone: an error says where they went.

They raise Python's own TypeError and AttributeError, so that `hasattr` and frameworks that look for a method find
none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Moved:
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Name -> what to do instead. They are attributes too, because most classes keep what they are given."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    by_position: str = ""
    """What to do with more arguments by position than the class takes."""


_TO_LOADER = "pass it to StreamingLoader"
_IN_LOOP = "leave it out: the training loop has every batch and tensor at hand"
_NO_RETRIES = "leave it out: failures that may pass are tried again for timeout_s"
_AHEAD = "leave it out: an Appliance's workers make batches ahead"
_OF_STREAMS = {"download_retry": _NO_RETRIES, "download_timeout": "pass timeout_s"}
_ORDER = {
    "shuffle_seed": "pass seed to StreamingLoader",
    "shuffle_block_size": "pass shuffle_block to StreamingLoader",
    "shuffle_algo": "leave it out: a StreamingLoader shuffles shards, and the samples of each shuffle_block",
    "batching_method": 'pass interleave to StreamingLoader: "shards" for "random", "samples" for "stratified", '
    '"batches" for "per_stream"',
    "num_canonical_nodes": "leave it out: any number of nodes gives the same order. For boxes that read only their own "
    "shards pass partitions to StreamingLoader",
    "partition_algo": "leave it out: any number of boxes shares the samples",
    "replication": "pass rank to StreamingLoader: ranks with an equal one get the same samples",
    "sampling_method": "leave it out, or for a fixed choice use MapLoader(torch.utils.data.Subset(dataset, numbers))",
    "sampling_granularity": "leave it out: an epoch takes single samples",
}

MOVED: Mapping[str, Moved] = {
    "StreamingDataset": Moved(
        {
            **dict.fromkeys(("batch_size", "shuffle", "epoch_size", "predownload"), _TO_LOADER),
            **_ORDER,
            **_OF_STREAMS,
            **dict.fromkeys(
                ("stream_name", "stream_config"),
                "leave it out: a file system registered with fsspec fetches in a way of your own",
            ),
        },
        {
            "next_epoch": "use set_epoch() of the StreamingLoader",
            "state_dict": "use that of the StreamingLoader, or of the penstock.client.DataLoader around it",
            "load_state_dict": "use that of the StreamingLoader, or of the penstock.client.DataLoader around it",
            "get_item": "use dataset[number]",
        },
        "pass split and all further arguments by name",
    ),
    "Stream": Moved(_OF_STREAMS),
    "StreamingLoader": Moved(
        {
            **_ORDER,
            **dict.fromkeys(
                ("pin_memory", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"), _AHEAD
            ),
            "num_workers": "pass fetch_threads, or num_workers_per_box to penstock.client.Appliance",
            "drop_last": 'pass tail="drop"',
            "sampler": "use MapLoader(torch.utils.data.Subset(dataset, numbers)) for an order of your own",
            "generator": "pass seed",
        },
        by_position="pass batch_size and all further arguments by name",
    ),
    "Appliance": Moved(
        {
            **{
                name: f"set PENSTOCK_{name.upper()}, or {name} in [{table}] of the settings file (`penstock config`)"
                for table, names in (
                    ("cluster", "tls_ca tls_cert tls_key tls_name credentials insecure"),
                    (
                        "client",
                        "lane compression http max_batch_bytes strict_structure retention_steps replay_s synthetic",
                    ),
                )
                for name in names.split()
            },
            "token": "set PENSTOCK_TOKEN, PENSTOCK_TOKEN_FILE or PENSTOCK_CREDENTIALS",
            "attempt": "set PENSTOCK_ATTEMPT",
        }
    ),
    "DataLoader": Moved(attributes={"cached_state": "use state_dict()"}),
    "DataExecutor": Moved(
        {
            "dataloader": "its name is loader",
            "activation_steps": _IN_LOOP,
            "listeners": _IN_LOOP,
            "writer": _IN_LOOP,
            "profiler_activities": "leave it out, and read executor.stats (docs/metrics.md)",
            "cs_config": "leave it out: Appliance has num_boxes and num_workers_per_box",
            "micro_batch_size": "leave it out: the training loop may divide a batch",
        },
        {"profiler": "read executor.stats (docs/metrics.md)"},
    ),
}


def says_where(cls: _Class) -> _Class:
    """Class decorator: the names of MOVED[cls.__name__] are errors with their remedies, also in subclasses."""
    name, moved, init = cls.__name__, MOVED[cls.__name__], cls.__init__  # type: ignore[misc]
    kinds = [parameter.kind for parameter in inspect.signature(init).parameters.values()]
    positions = len(kinds) if inspect.Parameter.VAR_POSITIONAL in kinds else kinds.count(kinds[0])
    attributes = {**moved.arguments, **moved.attributes}

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for given in kwargs:
            if given in moved.arguments:
                raise TypeError(f"{name} has no argument {given!r}: {moved.arguments[given]}")
        if moved.by_position and len(args) >= positions:
            raise TypeError(f"{name} takes {positions - 1} arguments by position, got {len(args)}: {moved.by_position}")
        init(self, *args, **kwargs)

    def missing(self: Any, attribute: str) -> Any:
        if attribute not in attributes:
            return object.__getattribute__(self, attribute)  # raises Python's error, or that of a property
        raise AttributeError(
            f"{name} has no attribute {attribute!r}: {attributes[attribute]}", name=attribute, obj=self
        )

    if moved.arguments:
        cls.__init__ = checked  # type: ignore[misc]
    cls.__getattr__ = missing  # type: ignore[attr-defined]
    return cls
