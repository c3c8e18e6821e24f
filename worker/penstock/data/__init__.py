"""Sources of training data with an exact position, for an input_fn or a plain torch DataLoader."""

from penstock.data.converting.convert import Converted, convert_dataset
from penstock.data.formats.lance.lance_rows import LanceRows
from penstock.data.formats.megatron.token_documents import MegatronDocuments
from penstock.data.loading.counting import Counts
from penstock.data.loading.map_loader import MapLoader
from penstock.data.loading.streaming_loader import StreamingLoader
from penstock.data.ordering.balancing.balanced_order import Balance
from penstock.data.sharded.blends.energon_blend import energon_blend, energon_concat
from penstock.data.sharded.blends.megatron_blend import megatron_blend
from penstock.data.sharded.layers.documents import Chunked
from penstock.data.sharded.layers.mapped import Filtered, Mapped, SkipSample
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.layers.mixture_schedule import Ramp, Schedule
from penstock.data.sharded.layers.packed import Packed
from penstock.data.sharded.layers.packed_rows import collate_packed
from penstock.data.sharded.layers.repeated import Repeated
from penstock.data.sharded.layers.windows import Grouped, WindowShuffled
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
