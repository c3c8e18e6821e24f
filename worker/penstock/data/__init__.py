"""Sources of training data with an exact position, for an input_fn or a plain torch DataLoader.

Each name is imported when first used: converting and indexing do not need torch.
"""

from typing import TYPE_CHECKING

from penstock.runtime.lazy_names import lazy_names

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
    from penstock.data.writing.index_table import index_table
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
    "index_table",
    "megatron_blend",
    "merge_index",
]

_BY_MODULE = {
    ".converting.convert": ["Converted", "convert_dataset"],
    ".formats.lance": ["LanceRows"],
    ".formats.media.clips": ["AudioClip", "VideoClip"],
    ".formats.megatron": ["MegatronDocuments"],
    ".loading.counting": ["Counts"],
    ".loading.map_loader": ["MapLoader"],
    ".loading.streaming_loader": ["StreamingLoader"],
    ".ordering.balance": ["Balance"],
    ".sharded.energon_blend": ["energon_blend", "energon_concat"],
    ".sharded.layers.chunked": ["Chunked"],
    ".sharded.layers.mapped": ["Filtered", "Mapped", "SkipSample"],
    ".sharded.layers.mixture": ["Mixture"],
    ".sharded.layers.mixture_schedule": ["Ramp", "Schedule"],
    ".sharded.layers.packed": ["Packed"],
    ".sharded.layers.packed_rows": ["collate_packed"],
    ".sharded.layers.repeated": ["Repeated"],
    ".sharded.layers.windows": ["Grouped", "WindowShuffled"],
    ".sharded.megatron_blend": ["megatron_blend"],
    ".sharded.protocol": ["Cursor", "ShardedSource"],
    ".sharded.shard_loader": ["ShardLoader"],
    ".sharded.sources.lines": ["LineFile"],
    ".sharded.sources.logical_shards": ["LogicalShards"],
    ".sharded.sources.savable": ["Savable"],
    ".streaming_dataset": ["StreamingDataset"],
    ".streams": ["Stream"],
    ".synthetic_dataset": ["SyntheticDataset"],
    ".writing.index_folder": ["index_folder"],
    ".writing.index_parquet": ["index_parquet"],
    ".writing.index_table": ["index_table"],
    ".writing.merge_index": ["merge_index"],
    ".writing.text_writers": ["CSVWriter", "JSONWriter", "TSVWriter", "XSVWriter"],
    ".writing.writers": ["MDSWriter"],
}

if not TYPE_CHECKING:  # type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(globals(), _BY_MODULE)
