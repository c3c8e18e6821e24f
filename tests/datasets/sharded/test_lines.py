"""Files of lines that are cut by ranges of bytes: each line once, in any number of shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from all_workers import AllWorkers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import LineFile, LogicalShards, Mapped, Repeated, ShardLoader
from penstock.proto.errors import DatasetError, StateMismatchError
from penstock.proto.state.snapshot_cadence import SnapshotCadence


def write(folder: Path, *counts: int) -> list[Path]:
    """Files of JSON lines of unequal lengths, numbered through."""
    folder.mkdir(exist_ok=True)
    paths, first = [], 0
    for file, count in enumerate(counts):
        paths.append(folder / f"{file}.jsonl")
        rows = [{"number": number, "text": "ü" * (number % 7)} for number in range(first, first + count)]
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += count
    return paths


def source_of(paths: list[Path], shards: int, **options: Any) -> LogicalShards:
    return LogicalShards([LineFile(path) for path in paths], shards=shards, **options)


@settings(max_examples=25)
@given(
    lines=st.lists(st.sampled_from([b"", b"1", b"22", b"333333", b"4\r"]), max_size=30),
    last=st.booleans(),
    parts=st.integers(1, 12),
)
def test_every_line_is_in_one_range(
    lines: list[bytes], last: bool, parts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x"
    path.write_bytes(b"\n".join(lines) + (b"\n" if last else b""))
    ranges: Any = LineFile(path, bytes).cut(parts)
    assert [each.end - each.begin for each in ranges] == [
        (part + 1) * path.stat().st_size // parts - part * path.stat().st_size // parts for part in range(parts)
    ]
    found = []
    for each in ranges:
        opened = each()
        found += list(opened)
        opened.close()
    assert found == [line.rstrip(b"\r") for line in lines if line.rstrip(b"\r")]


def test_few_files_make_many_shards(tmp_path: Path) -> None:
    """Divide four files into twelve shards, repeatedly, which failed once. One file can become any number of shards."""
    for counts in ([40, 10, 90, 60], [200]):
        paths = write(tmp_path, *counts)
        source = Repeated(Mapped(source_of(paths, 12), lambda row: row["number"]))
        cluster = AllWorkers(lambda: ShardLoader(source, batch_size=4, collate_fn=list), (1, 3))  # noqa: B023
        got = [row for batch in cluster.take(12) for row in batch]
        assert len(set(got)) == 48
        after = AllWorkers(cluster.made, (1, 4), cluster)
        whole = AllWorkers(cluster.made, (1, 1)).take(40)
        assert [*got, *(row for batch in after.take(28) for row in batch)] == [row for batch in whole for row in batch]
        epoch = [row["number"] for shard in range(12) for row in source_of(paths, 12).open(shard, 0, 0)]
        assert sorted(epoch) == list(range(200))


def test_saved_position_is_one_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on reads what came since the last snapshot again, and not the range from its beginning."""
    monkeypatch.setattr(SnapshotCadence, "due", lambda self, now: True)  # on a busy machine they would come more rarely
    parsed: list[bytes] = []

    def parse(line: bytes) -> Any:
        parsed.append(line)
        return json.loads(line)

    source = LogicalShards([LineFile(write(tmp_path, 20000)[0], parse)], shards=2)
    cursor = source.open(1, 0, 0)
    passed = [next(cursor) for _ in range(9000)]
    position = cursor.saved_position()
    rest = list(cursor)
    parsed.clear()
    assert list(source.open(1, 0, 0, position)) == rest
    assert len(parsed) - len(rest) < len(passed) // 2


def test_another_file_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, 100)
    loader = ShardLoader(source_of(paths, 4, names=["a"]), batch_size=4, collate_fn=list)
    begun = iter(loader)
    next(begun)
    state = loader.state_dict()
    source = source_of(paths, 4)
    paths[0].write_text(paths[0].read_text() + "{}\n")
    with pytest.raises(StateMismatchError, match=r"data"):
        ShardLoader(source_of(paths, 4, names=["a"]), batch_size=4, collate_fn=list).load_state_dict(state)
    with pytest.raises(DatasetError, match=r"0\.jsonl must keep its \d+ bytes, got \d+"):
        next(source.open(0, 0, 0))
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        LineFile(tmp_path / "none")


def test_a_line_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(json.JSONDecodeError) as caught:
        list(LogicalShards([LineFile(tmp_path / "x")], shards=1).open(0, 0, 0))
    assert f"raised for the line that begins at {tmp_path / 'x'}, byte 9" in caught.value.__notes__
