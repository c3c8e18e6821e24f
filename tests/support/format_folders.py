"""Small datasets in the formats of other libraries, and the samples that are in them.

To have a format checked by tests/datasets/test_format_contract.py, add a line to FOLDERS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.megatron.token_documents import megatron_shard
from penstock.data.formats.shards import Shard

__all__ = ["FOLDERS", "Made", "indexed", "plainly"]

DATA = Path(__file__).parents[1] / "data"
Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Made:
    """Dataset in a folder."""

    folder: Path
    samples: Samples
    """Samples in the order of their numbers, as the format's own library has them."""


def indexed(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of shards that lie in a folder."""
    (folder / INDEX).write_bytes(write_index(shards))


def plainly(value: Any) -> Any:
    """Return a sample in a form that == compares, with dtypes."""
    if isinstance(value, dict):
        return {name: plainly(each) for name, each in value.items()}
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, np.generic):
        return (value.dtype.str, value.item())
    return [plainly(each) for each in value] if isinstance(value, list) else value


def megatron(folder: Path) -> Samples:
    """Files that megatron-core wrote, see tests/data/megatron/make.py."""
    expected = json.loads((DATA / "megatron" / "expected.json").read_text())
    samples: Samples = []
    shards = []
    for name, dtype in (("text", np.uint16), ("sentences", np.int32)):
        for end in ("bin", "idx"):
            shutil.copy(DATA / "megatron" / f"{name}.{end}", folder)
        shards.append(megatron_shard(folder / f"{name}.bin", f"{name}.bin"))
        samples += [
            {
                "tokens": np.array([token for one in document for token in one], dtype),
                "sequence_lengths": np.array([len(one) for one in document], np.int32),
            }
            for document in expected[name]
        ]
    indexed(folder, shards)
    return samples


FOLDERS: dict[str, Callable[[Path], Samples]] = {"megatron": megatron}
"""Function that writes a dataset into an empty folder and returns its samples, by format."""
