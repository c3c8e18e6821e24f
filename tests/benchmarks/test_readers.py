"""The comparison of readers: turns, equality and the report, with players that need no other library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.readers.__main__ import QUICK, compare
from benchmarks.readers.batch_reader import Ours, all_samples
from benchmarks.readers.pairs import ORDERS, PAIRS
from benchmarks.readers.tables import OursTable, TheirsDelta, TheirsIceberg
from benchmarks.streaming_data import Kind, value_checksum
from benchmarks.streaming_player import answer_of
from benchmarks.streaming_report import OURS

from penstock.data import MDSWriter

PAIR = PAIRS[0]


class Answering:
    """Players that answer at once, and note what they were asked."""

    def __init__(self, checksums: dict[str, int], rates: dict[str, list[int]]) -> None:
        self.asked: list[str] = []
        self._checksums, self._rates = checksums, rates

    def ask(self, name: str, **request: Any) -> dict[str, Any] | None:
        self.asked.append(f"{request['do']} {name}")
        if request["do"] == "check":
            return {"samples": 5, "checksum": self._checksums[name]}
        if request["do"] != "rate":
            return {}
        return {"samples": self._rates[name].pop(0), "seconds": 1.0, "processor_s": 2.0 if name == OURS else 1.0}


def compared(folder: Path, ours: int = 1) -> tuple[dict[str, Any], list[str]]:
    rates = {OURS: [200, 300, 200, 300], PAIR.peer: [100, 100, 400, 100]}
    players: Any = Answering({OURS: ours, PAIR.peer: 1}, rates)
    return compare(PAIR, QUICK[0], players, folder, 2, 0.0), players.asked


def test_readers_take_turns(tmp_path: Path) -> None:
    found, asked = compared(tmp_path)
    turns = [name.removeprefix("rate ") for name in asked if name.startswith("rate")]
    assert turns == [PAIR.peer, OURS] * 4
    assert asked[:2] == [f"write {PAIR.peer}", f"write {OURS}"], "the other library writes what both read"
    assert found["checked"]
    assert not found["failures"]


@pytest.mark.parametrize("library", [TheirsDelta, TheirsIceberg])
@pytest.mark.parametrize("kind", QUICK, ids=[kind.name for kind in QUICK])
def test_readers_of_tables_read_the_same(library: Any, kind: Kind, tmp_path: Path) -> None:
    asked = {"kind": kind.name, "folder": str(tmp_path / "data"), "samples": kind.samples}
    readers = library(), OursTable()
    for reader in readers:
        answer_of(reader, {"do": "write", **asked})
    wanted = value_checksum(all_samples(kind.name, kind.samples))
    for reader in readers:
        answer = answer_of(reader, {"do": "check", "shuffle": False, **asked})
        assert answer == dict(zip(("samples", "checksum"), wanted, strict=True))


def test_our_reader_reads_what_was_written(tmp_path: Path) -> None:
    kind = QUICK[0]
    with MDSWriter(tmp_path / "data", kind.columns) as writer:
        for sample in all_samples(kind.name, kind.samples):
            writer.write(sample)
    count, checksum = value_checksum(all_samples(kind.name, kind.samples))
    for shuffle in ORDERS.values():
        asked = {"do": "check", "kind": kind.name, "folder": str(tmp_path / "data"), "shuffle": shuffle}
        assert answer_of(Ours(), asked) == {"samples": count, "checksum": checksum}
