"""Indexes of datasets with numbers and names that no file can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.data import StreamingDataset
from penstock.proto.errors import DatasetError

MDS = Path(__file__).parents[1] / "data" / "mds" / "encodings"


RAW = json.loads((MDS / "index.json").read_text())["shards"][0]["raw_data"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": 10**4000}, "samples is invalid: Expected `int` <= 17592186044416"),
        ({"raw_data": {**RAW, "basename": "\ud800"}}, "the index is invalid: JSON is malformed"),
        ({"raw_data": {**RAW, "basename": "x" * 256}}, "must have at most 255 bytes between two slashes"),
        ({"raw_data": {**RAW, "basename": "x/" * 2000 + "x"}}, "and 3000 in all"),
    ],
    ids=["samples", "surrogate", "step", "path"],
)
def test_what_no_file_can_have_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    index = json.loads((MDS / "index.json").read_text())
    index["shards"][0].update(changes)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DatasetError, match=why):
        StreamingDataset(local=tmp_path)
