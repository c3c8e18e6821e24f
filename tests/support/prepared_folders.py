"""Small folders as `energon prepare` leaves them."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

from archives import archive

__all__ = ["prepare", "write_offsets_of_energon"]

FIELDS = "field_map: {caption: txt, first: 'json[l][0]', image: 'jpg,bin'}"
SPLITS = "exclude: [d_2.tar]\nsplit_parts:\n  train: ['d_{0..2}.tar']\n  val: ['{v,w}.tar']\n  test: []\n"


def prepare(root: Path, splits: str = SPLITS, dataset: str = FIELDS, counted: int = 2) -> Path:
    for number, name in enumerate(("d_0", "d_1", "d_2", "v", "w")):
        members: list[tuple[str, bytes]] = []
        for n in (2 * number, 2 * number + 1):
            members += [
                (f"{n}.txt", b"%d" % n),
                (f"{n}.bin", b"b%d" % n),
                (f"{n}.json", json.dumps({"l": [n]}).encode()),
            ]
        archive(root / f"{name}.tar", members)
    meta = root / ".nv-meta"
    meta.mkdir()
    (meta / "split.yaml").write_text(splits)
    (meta / "dataset.yaml").write_text(dataset)
    (meta / ".info.json").write_text(json.dumps({"shard_counts": {"d_0.tar": counted}}))
    return root


def write_offsets_of_energon(root: Path) -> None:
    """Write NAME.tar.idx beside each archive, as `energon prepare` does."""
    for path in root.glob("*.tar"):
        with tarfile.open(path) as opened:
            members = opened.getmembers()
            begins = [member.offset for member in members if member.name.endswith(".txt")]
            (root / f"{path.name}.idx").write_bytes(struct.pack(f"<{len(begins) + 1}Q", *begins, opened.offset))
