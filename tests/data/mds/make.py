"""Datasets written by mosaicml-streaming 0.13.0, and what it reads from them. Runs where that is installed.

    make peers    # once
    .peers/streaming/bin/python tests/data/mds/make.py write tests/data/mds
    .peers/streaming/bin/python tests/data/mds/make.py read FOLDER...

`write` makes a folder for each recipe of tests/support/mds_recipes.py, and expected.json with what its own reader says
of each. `read` prints the same of other folders: {folder: [sample, ...]}.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support")]

from benchmarks.peers.importing import import_streaming  # noqa: E402  # they are found only now
from mds_recipes import RECIPES  # noqa: E402
from plain_values import plain  # noqa: E402

streaming = import_streaming()
VERSION = "0.13.0"


def read(folder: Path) -> list[Any]:
    """All samples, in plain form: decompressed, hashes checked, as a user of StreamingDataset gets them."""
    shards = json.loads((folder / "index.json").read_text())["shards"]
    if not sum(shard["samples"] for shard in shards):
        return []  # its StreamingDataset refuses one without samples
    hashes = shards[0]["hashes"]
    with tempfile.TemporaryDirectory() as local:
        dataset = streaming.StreamingDataset(
            remote=str(folder),
            local=f"{local}/copy",
            batch_size=1,
            allow_unsafe_types=True,
            validate_hash=hashes[0] if hashes else None,
        )
        return [plain(dataset[i]) for i in range(dataset.size)]


def write(out: Path) -> None:
    expected = {}
    for top in {name.partition("/")[0] for name in RECIPES}:
        shutil.rmtree(out / top, ignore_errors=True)
    for name, recipe in RECIPES.items():
        folder = out / name
        writer = getattr(streaming, recipe.writer)
        with writer(out=str(folder), columns=recipe.columns, **recipe.settings) as file:
            for sample in recipe.samples():
                file.write(sample)
        expected[name] = read(folder)
    streaming.base.util.merge_index(str(out / "merged"))
    expected["merged"] = read(out / "merged")
    lines = [f"{json.dumps(name)}: [\n{_lines(samples)}\n]" for name, samples in sorted(expected.items())]
    (out / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(samples: list[Any]) -> str:
    return ",\n".join(json.dumps(sample, ensure_ascii=False) for sample in samples)


def main(task: str, *folders: str) -> None:
    if streaming.__version__ != VERSION:
        sys.exit(f"mosaicml-streaming {VERSION} was expected, not {streaming.__version__}")
    if task == "write":
        write(Path(folders[0]))
    else:
        print(json.dumps({folder: read(Path(folder)) for folder in folders}))


if __name__ == "__main__":
    main(*sys.argv[1:])
