"""Pairs of readers that are compared: another library on its own format, and Penstock on the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.modes import Mode
from benchmarks.streaming_report import OURS

__all__ = ["ENVIRONMENT", "ORDERS", "PAIRS", "Pair"]

ORDERS: Mapping[str, bool] = {"in sequence": False, "shuffled": True}
"""Orders of an epoch, by name: True for a shuffled order."""

ENVIRONMENT = "readers"
"""Name of the Python environment with Penstock and all compared libraries, below the folder of the peers'
environments."""


@dataclass(frozen=True)
class Pair:
    peer: str
    format: str
    module: str
    """Name of the module, in this folder, with the two readers."""
    theirs: str = "Theirs"
    ours: str = "Ours"
    orders: Sequence[str] = tuple(ORDERS)
    images: bool = False
    """True if the two readers are also compared on images."""

    @property
    def name(self) -> str:
        return f"{self.peer} ({self.format})"

    @property
    def modes(self) -> dict[str, Mode]:
        """Commands of the two readers' processes, by name. The other library's is the first, because it writes the
        files."""
        classes = {self.peer: self.theirs, OURS: self.ours}
        return {
            name: Mode(name, ("benchmarks.readers.player", self.module, chosen), ENVIRONMENT)
            for name, chosen in classes.items()
        }


PAIRS = (
    Pair("mosaicml-streaming", "MDS", "mds", images=True),
    Pair("litdata", "its own; Penstock: MDS", "litdata"),
    Pair("Lance", "Lance", "lance"),
    Pair("datasets, buffer", "Arrow", "huggingface", "TheirsSaved", "OursSaved"),
    Pair("datasets, exact", "Arrow", "huggingface", "TheirsSavedExact", "OursSaved", ("shuffled",)),
    Pair("datasets, buffer", "Parquet", "huggingface", "TheirsParquet", "OursParquet"),
    Pair("deltalake", "Delta Lake", "tables", "TheirsDelta", "OursTable", ("in sequence",)),
    Pair("pyiceberg", "Iceberg", "tables", "TheirsIceberg", "OursTable", ("in sequence",)),
    Pair("webdataset", "tar", "webdataset"),
    Pair("Grain", "ArrayRecord", "array_record"),
)
