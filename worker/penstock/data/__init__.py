"""Sources of training data with an exact position, for an input_fn or a plain torch DataLoader.

Each name is imported when first used, because torch takes 2 s to import and converting or indexing does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.data.converting.convert import Converted, convert_dataset
    from penstock.data.formats.lance import LanceRows
    from penstock.data.formats.media.clips import AudioClip, VideoClip
    from penstock.data.formats.megatron import MegatronDocuments
    from penstock.data.loading.counting import Counts
    from penstock.data.loading.map_loader import MapLoader
    from penstock.data.loading.streaming_loader import StreamingLoader
    from penstock.data.ordering.balance import Balance
    from penstock.data.sharded.energon_blend import energon_blend, energon_concat
    from penstock.data.sharded.layers.chunked import Chunked
    from penstock.data.sharded.layers.mapped import Filtered, Mapped, SkipSample
    from penstock.data.sharded.layers.mixture import Mixture
    from penstock.data.sharded.layers.mixture_schedule import Ramp, Schedule
    from penstock.data.sharded.layers.packed import Packed
    from penstock.data.sharded.layers.packed_rows import collate_packed
    from penstock.data.sharded.layers.repeated import Repeated
    from penstock.data.sharded.layers.windows import Grouped, WindowShuffled
    from penstock.data.sharded.megatron_blend import megatron_blend
    from penstock.data.sharded.protocol import Cursor, ShardedSource
    from penstock.data.sharded.shard_loader import ShardLoader
    from penstock.data.sharded.sources.lines import LineFile
    from penstock.data.sharded.sources.logical_shards import LogicalShards
    from penstock.data.sharded.sources.savable import Savable
    from penstock.data.streaming_dataset import StreamingDataset
    from penstock.data.streams import Stream
    from penstock.data.synthetic_dataset import SyntheticDataset
    from penstock.data.writing.index_folder import index_folder
    from penstock.data.writing.index_parquet import index_parquet
    from penstock.data.writing.merge_index import merge_index
    from penstock.data.writing.text_writers import CSVWriter, JSONWriter, TSVWriter, XSVWriter
    from penstock.data.writing.writers import MDSWriter

__all__ = [
    "AudioClip",
    "Balance",
    "CSVWriter",
    "Chunked",
    "Converted",
    "Counts",
    "Cursor",
    "Filtered",
    "Grouped",
    "JSONWriter",
    "LanceRows",
    "LineFile",
    "LogicalShards",
    "MDSWriter",
    "MapLoader",
    "Mapped",
    "MegatronDocuments",
    "Mixture",
    "Packed",
    "Ramp",
    "Repeated",
    "Savable",
    "Schedule",
    "ShardLoader",
    "ShardedSource",
    "SkipSample",
    "Stream",
    "StreamingDataset",
    "StreamingLoader",
    "SyntheticDataset",
    "TSVWriter",
    "VideoClip",
    "WindowShuffled",
    "XSVWriter",
    "collate_packed",
    "convert_dataset",
    "energon_blend",
    "energon_concat",
    "index_folder",
    "index_parquet",
    "megatron_blend",
    "merge_index",
]

_MODULES = {
    "AudioClip": "formats.media.clips",
    "Balance": "ordering.balance",
    "CSVWriter": "writing.text_writers",
    "Chunked": "sharded.layers.chunked",
    "Converted": "converting.convert",
    "Counts": "loading.counting",
    "Cursor": "sharded.protocol",
    "Filtered": "sharded.layers.mapped",
    "Grouped": "sharded.layers.windows",
    "JSONWriter": "writing.text_writers",
    "LanceRows": "formats.lance",
    "LineFile": "sharded.sources.lines",
    "LogicalShards": "sharded.sources.logical_shards",
    "MDSWriter": "writing.writers",
    "MapLoader": "loading.map_loader",
    "Mapped": "sharded.layers.mapped",
    "MegatronDocuments": "formats.megatron",
    "Mixture": "sharded.layers.mixture",
    "Packed": "sharded.layers.packed",
    "Ramp": "sharded.layers.mixture_schedule",
    "Repeated": "sharded.layers.repeated",
    "Savable": "sharded.sources.savable",
    "Schedule": "sharded.layers.mixture_schedule",
    "ShardLoader": "sharded.shard_loader",
    "ShardedSource": "sharded.protocol",
    "SkipSample": "sharded.layers.mapped",
    "Stream": "streams",
    "StreamingDataset": "streaming_dataset",
    "StreamingLoader": "loading.streaming_loader",
    "SyntheticDataset": "synthetic_dataset",
    "TSVWriter": "writing.text_writers",
    "VideoClip": "formats.media.clips",
    "WindowShuffled": "sharded.layers.windows",
    "XSVWriter": "writing.text_writers",
    "collate_packed": "sharded.layers.packed_rows",
    "convert_dataset": "converting.convert",
    "energon_blend": "sharded.energon_blend",
    "energon_concat": "sharded.energon_blend",
    "index_folder": "writing.index_folder",
    "index_parquet": "writing.index_parquet",
    "megatron_blend": "sharded.megatron_blend",
    "merge_index": "writing.merge_index",
}
"""Public name -> its module, relative to this package."""

if not TYPE_CHECKING:  # type checkers would take any name for one of this package

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
