"""Make the files in this folder with megatron-core 0.16.1: `PYTHONPATH=FOLDER_OF_MEGATRON python make.py`.

`text`: 40 documents of one sequence, uint16. `sentences`: 12 documents of none to 4 sequences, int32. `images`: 6
multimodal documents, int32, whose second sequences have mode 1. expected.json has the documents as IndexedDataset read
them: for each one the tokens of its sequences, and their modes.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

HERE = Path(__file__).parent


def build(name: str, dtype: type[np.number], documents: list[list[int]], *, multimodal: bool = False) -> None:
    """Write documents with sequences of these lengths."""
    builder = IndexedDatasetBuilder(str(HERE / f"{name}.bin"), dtype=dtype, multimodal=multimodal)
    token = 0
    for lengths in documents:
        for number, length in enumerate(lengths):
            tokens = torch.arange(token, token + length) * 7 % 50_000
            builder.add_item(tokens, mode=number % 2) if multimodal else builder.add_item(tokens)
            token += length
        builder.end_document()
    builder.finalize(str(HERE / f"{name}.idx"))


def main() -> None:
    build("text", np.uint16, [[1 + i * 13 % 31] for i in range(40)])
    build("sentences", np.int32, [[2 + (i + k) % 5 for k in range(i % 5)] for i in range(12)])
    build("images", np.int32, [[3 + i, 4] for i in range(6)], multimodal=True)
    expected: dict[str, Any] = {}
    for name in ("text", "sentences", "images"):
        data = IndexedDataset(str(HERE / name), multimodal=name == "images")
        bounds = data.document_indices.tolist()
        expected[name] = [
            [data[i][0].tolist() if data.multimodal else data[i].tolist() for i in range(begin, end)]
            for begin, end in pairwise(bounds)
        ]
        if data.multimodal:
            expected["modes"] = [int(data[i][1]) for i in range(len(data))]
    (HERE / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
