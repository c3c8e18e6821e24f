"""Commits to Delta Lake tables by hand, by its protocol: deltalake writes no deletion vectors, and renames no columns.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from pyroaring import BitMap64

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""The alphabet of ZeroMQ's Base-85, in which Delta Lake writes small vectors."""


def log_of(table: Path) -> list[dict[str, Any]]:
    """Return all actions in the log of a table without checkpoints, in order."""
    return [
        json.loads(line) for path in sorted(table.glob("_delta_log/*.json")) for line in path.read_text().splitlines()
    ]


def commit(table: Path, *actions: dict[str, Any]) -> None:
    version = len(list(table.glob("_delta_log/*.json")))
    path = table / "_delta_log" / f"{version:020}.json"
    path.write_text("".join(f"{json.dumps(action)}\n" for action in actions))


def upgrade(features: list[str]) -> dict[str, Any]:
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": features,
            "writerFeatures": features,
        }
    }


def delete_by_vector(table: Path, deleted: dict[str, list[int]], features: list[str], *, inline: bool) -> None:
    """Commit a deletion vector for each file: in the log, or in a file of its own, as the protocol describes both."""
    adds = {action["add"]["path"]: action["add"] for action in log_of(table) if "add" in action}
    actions: list[dict[str, Any]] = [upgrade(features)]
    for number, (path, rows) in enumerate(deleted.items()):
        vector = struct.pack("<I", 1681511377) + BitMap64(rows).serialize()
        if inline:
            padded = vector + bytes(-len(vector) % 4)
            words = struct.unpack(f">{len(padded) // 4}I", padded)
            text = "".join(Z85[word // 85**place % 85] for word in words for place in (4, 3, 2, 1, 0))
            place: dict[str, Any] = {"storageType": "i", "pathOrInlineDv": text}
        else:
            name = f"deletion_vector_{len(log_of(table))}_{number}.bin"
            sized = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
            (table / name).write_bytes(b"\x01" + sized)
            place = {"storageType": "p", "pathOrInlineDv": (table / name).as_uri(), "offset": 1}
        place |= {"sizeInBytes": len(vector), "cardinality": len(rows)}
        before = {name: adds[path][name] for name in ("deletionVector",) if name in adds[path]}
        removed = {"path": path, "deletionTimestamp": 1, "dataChange": True, **before}
        actions += [{"remove": removed}, {"add": adds[path] | {"deletionVector": place}}]
    commit(table, *actions)
