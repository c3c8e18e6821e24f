"""Indexes of datasets with numbers and names that no file can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.data import StreamingDataset
from penstock.proto.errors import DatasetError

MDS = Path(__file__).parents[1] / "data" / "mds" / "encodings"


@pytest.mark.parametrize("samples", [1 << 63, 1 << 64, 10**4000], ids=["63", "64", "huge"])
def test_samples_beyond_counting_are_refused(tmp_path: Path, samples: int) -> None:
    refused(tmp_path, "samples must be at most", samples=samples)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("\ud800", "the index must be JSON"),
        ("x" * 256, "must have at most 255 bytes between two slashes"),
        ("x/" * 2000 + "x", "and 3000 in all"),
        ("\u00fc" * 128, "must have at most 255 bytes between two slashes"),
    ],
    ids=["surrogate", "step", "path", "bytes"],
)
def test_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str, why: str) -> None:
    raw = json.loads((MDS / "index.json").read_text())["shards"][0]["raw_data"]
    refused(tmp_path, why, raw_data={**raw, "basename": name})


def refused(folder: Path, why: str, **changes: Any) -> None:
    index = json.loads((MDS / "index.json").read_text())
    index["shards"][0].update(changes)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DatasetError, match=why):
        StreamingDataset(local=folder)
