"""Sources of training data with an exact position, for an input_fn or a plain torch DataLoader."""

from penstock.worker.datasets.formats.merging import merge_index
from penstock.worker.datasets.formats.parquet import index_parquet
from penstock.worker.datasets.formats.text_writing import CSVWriter, JSONWriter, TSVWriter, XSVWriter
from penstock.worker.datasets.formats.writing import MDSWriter
from penstock.worker.datasets.map_loader import MapLoader
from penstock.worker.datasets.sharded.documents import Chunked, Packed
from penstock.worker.datasets.sharded.lines import LineFile
from penstock.worker.datasets.sharded.loader import ShardLoader
from penstock.worker.datasets.sharded.logical import LogicalShards
from penstock.worker.datasets.sharded.mapped import Filtered, Mapped, SkipSample
from penstock.worker.datasets.sharded.mixture import Mixture
from penstock.worker.datasets.sharded.protocol import Cursor, ShardedSource
from penstock.worker.datasets.sharded.repeated import Repeated
from penstock.worker.datasets.sharded.savable import Savable
from penstock.worker.datasets.sharded.windows import Grouped, WindowShuffled
from penstock.worker.datasets.streaming import Stream, StreamingDataset
from penstock.worker.datasets.streaming_loader import StreamingLoader
from penstock.worker.datasets.synthetic import SyntheticDataset

__all__ = [
    "CSVWriter",
    "Chunked",
    "Cursor",
    "Filtered",
    "Grouped",
    "JSONWriter",
    "LineFile",
    "LogicalShards",
    "MDSWriter",
    "MapLoader",
    "Mapped",
    "Mixture",
    "Packed",
    "Repeated",
    "Savable",
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
    "index_parquet",
    "merge_index",
]
