"""Make the folders beside this file with Hugging Face datasets 5.2.0: `PYTHONPATH=FOLDER_OF_DATASETS python make.py`.

`chosen`: 30 rows of 50, shuffled and selected before they were saved to two files. `splits`: a DatasetDict. Columns:
token lists, texts (some null), class labels, images as stored (bytes of a PNG file) and arrays of 2 x 3. expected.json
has the rows as datasets reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).parent
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6360000000020001"
    "48afa4710000000049454e44ae426082"
)


def main() -> None:
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "image": datasets.Image(decode=False),
            "grid": datasets.Array2D((2, 3), "float32"),
        }
    )
    rows: dict[str, list[Any]] = {
        "input_ids": [list(range(i, i + i % 7)) for i in range(50)],
        "text": [None if i % 9 == 4 else f"row {i} ü" for i in range(50)],
        "label": [i % 2 for i in range(50)],
        "image": [{"bytes": PNG, "path": f"{i}.png"} for i in range(50)],
        "grid": [[[i, 0.5, 1], [2, 3, 4]] for i in range(50)],
    }
    whole = datasets.Dataset.from_dict(rows, features=features)
    saved = {
        "chosen": whole.shuffle(seed=1).select(range(30)),
        "splits/train": whole,
        "splits/test": whole.select([3, 1]),
    }
    saved["chosen"].save_to_disk(HERE / "chosen", num_shards=2)
    datasets.DatasetDict({name: saved[f"splits/{name}"] for name in ("train", "test")}).save_to_disk(HERE / "splits")
    expected = {name: list(dataset) for name, dataset in saved.items()}
    for each in expected.values():
        for row in each:
            assert row["image"].pop("bytes") == PNG
    (HERE / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
