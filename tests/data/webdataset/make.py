"""Tar files written by webdataset, and what its own reader reads from them.

    pip install --target LIBS --no-deps webdataset==1.0.2 braceexpand==0.1.7
    PYTHONPATH=LIBS python tests/data/webdataset/make.py tests/data/webdataset

Writes shards/train-00000.tar and train-00001.tar, and expected.json: the samples as webdataset yields them, values as
hexadecimal bytes. names.tar and names.json are of members whose names have several dots.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

SAMPLES = 12
NAMES = {"a/song v1": ("0.mp3", "5.mp3"), "a/song v2": ("0.mp3", "0.lyrics"), "b": ("mp3", "lyrics")}
"""Key -> columns, by webdataset's rule."""


def image(i: int, form: str) -> bytes:
    out = io.BytesIO()
    pixels = np.full((3, 4, 3), i * 20 % 256, np.uint8)
    pixels[0, 0] = 255 - i
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def array(i: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(i + 1, dtype=np.float32).reshape(1, -1))
    return out.getvalue()


def sample(i: int) -> dict[str, object]:
    made: dict[str, object] = {
        "__key__": f"part/{i:04d}" if i != 5 else "part/" + "long" * 50,
        "txt": f"caption {i} ü".encode(),
        "json": json.dumps({"number": i, "words": ["a", "b"]}).encode(),
        "cls": str(i).encode(),
        "jpg": image(i, "JPEG"),
        "seg.png": image(i, "PNG"),
        "npy": array(i),
    }
    if i % 3 == 0:
        made["bin"] = bytes([i]) * (700 * i)
    return made


def main(folder: Path) -> None:
    shards = folder / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(shards / "train-%05d.tar"), maxcount=7, mtime=0) as writer:
        for i in range(SAMPLES):
            writer.write(sample(i))
    with webdataset.TarWriter(str(folder / "names.tar"), mtime=0) as writer:
        for key, columns in NAMES.items():
            writer.write({"__key__": key, **{name: name.encode() for name in columns}})
    expect(sorted(shards.glob("*.tar")), folder / "expected.json")
    expect([folder / "names.tar"], folder / "names.json")


def expect(archives: list[Path], out: Path) -> None:
    expected = [
        {name: value.hex() if isinstance(value, bytes) else value for name, value in read.items() if name != "__url__"}
        for read in webdataset.WebDataset([str(path) for path in archives], shardshuffle=False)
    ]
    plain = [{k: v for k, v in one.items() if not k.startswith("__local")} for one in expected]
    out.write_text(json.dumps(plain, sort_keys=True, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
