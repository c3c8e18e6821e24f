"""Compressed files of lines, rows and arrays, read in sequence: gzip and zstd of one frame and of many."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import logging
import lzma
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pytest
import zstandard
from all_workers import AllWorkers

from penstock.data import LineFile, LogicalShards, Repeated, ShardLoader, index_folder
from penstock.data.formats import compressed_files
from penstock.data.formats.compressed_files import FramesFile
from penstock.data.sharded.sources import lines
from penstock.proto.errors import DatasetError, ShardCorruptError

ROWS = [{"number": number, "text": "ü\n" * (number % 7)} for number in range(3000)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]


def packed(kind: str, content: bytes, frames: int) -> bytes:
    size = -(-len(content) // frames)
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    if kind == "gz":
        return b"".join(map(gzip.compress, parts))
    skipped = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"sizes"  # as pzstd and t2sz write
    sized = zstandard.ZstdCompressor(write_checksum=True)
    streamed = zstandard.ZstdCompressor(write_content_size=False)
    return skipped + b"".join((sized, streamed)[n % 2].compress(part) for n, part in enumerate(parts)) + skipped


def opening(file: LineFile) -> Any:
    [whole] = file.cut(1)
    return whole()


def rest_of(file: LineFile, position: Any) -> list[Any]:
    opened = opening(file)
    opened.load_state_dict(position)
    rows = list(opened)
    opened.close()
    return rows


@pytest.mark.parametrize("frames", [1, 40])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_any_place_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, frames: int) -> None:
    """Whatever is read at once; in a file of many frames by reading one of them."""
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(packed(kind, b"\n".join(LINES), frames))  # with empty lines
    for at_once in (1, 7, 8 << 10) if frames > 1 else (8 << 10,):
        monkeypatch.setattr(compressed_files, "AT_ONCE", at_once)
        opened = opening(LineFile(path))
        found, places = [], []
        for row in opened:
            found.append(row)
            places.append(opened.state_dict())
        assert found == ROWS
        assert len({frame for frame, _ in places}) == frames
        assert max(inside for _, inside in places) <= len(b"\n".join(LINES)) // frames + 200
        for number in random.Random(1).sample(range(len(ROWS)), 20):
            assert rest_of(LineFile(path), places[number]) == ROWS[number + 1 :]


@pytest.mark.parametrize("kind", ["gz", "zst", "", "bgzip"])
def test_rows_of_csv(tmp_path: Path, kind: str) -> None:
    """Equal to pyarrow's, with line ends within values."""
    table = pyarrow.table({"number": [str(row["number"]) for row in ROWS], "text": [row["text"] for row in ROWS]})
    sink = io.BytesIO()
    pyarrow.csv.write_csv(table, sink)
    path = tmp_path / ("a.csv" + (f".{'gz' if kind == 'bgzip' else kind}" if kind else ""))
    content = sink.getvalue()
    path.write_bytes(content if not kind else packed("gz" if kind == "bgzip" else kind, content, 30))
    opened = opening(LineFile(path))
    first = [next(opened) for _ in range(1700)]
    place = opened.state_dict()
    assert [*first, *opened] == table.to_pylist()
    assert rest_of(LineFile(path), place) == table.to_pylist()[1700:]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "b.json.zst"])
@pytest.mark.parametrize("array", [True, False])
def test_json_is_lines_or_an_array(tmp_path: Path, name: str, array: bool) -> None:
    content = b"\xef\xbb\xbf" + (json.dumps(ROWS, indent=1).encode() if array else b"".join(LINES))
    kind = name.rpartition(".")[2]
    (tmp_path / name).write_bytes(content if kind == "json" else packed(kind, content, 3))
    if not array and kind == "json":
        (tmp_path / name).write_bytes(b"".join(LINES))  # a plain file of lines is cut
    cut = LineFile(tmp_path / name).cut(3)
    assert len(cut) == (3 if kind == "json" and not array else 1)
    rows = []
    for each in cut:
        opened: Any = each()
        rows += list(opened)
        opened.close()
    assert rows == ROWS
    opened = opening(LineFile(tmp_path / name))
    _ = [next(opened) for _ in range(500)]
    assert rest_of(LineFile(tmp_path / name), opened.state_dict()) == ROWS[500:]
    opened.close()


def test_loader_resumes_on_other_workers(tmp_path: Path) -> None:
    paths = []
    for number in range(6):
        paths.append(tmp_path / f"{number}.jsonl.{('gz', 'zst')[number % 2]}")
        part = b"".join(LINES[number * 500 : number * 500 + 500])
        paths[-1].write_bytes(packed(("gz", "zst")[number % 2], part, 1 + number))
    source = Repeated(LogicalShards([LineFile(path) for path in paths], shards=6, shuffle=True))

    def numbers(batch: list[dict[str, Any]]) -> list[int]:
        return [row["number"] for row in batch]

    cluster = AllWorkers(lambda: ShardLoader(source, batch_size=4, collate_fn=numbers), (1, 3))
    got = cluster.take(300)
    after = AllWorkers(cluster.made, (1, 2), cluster)
    assert [*got, *after.take(600)] == AllWorkers(cluster.made, (1, 1)).take(900)


def test_a_long_frame_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lines, "SAID_BYTES", 20_000)
    for frames, said in ((1, 1), (40, 0)):
        path = tmp_path / f"{frames}.jsonl.zst"
        path.write_bytes(packed("zst", b"".join(LINES), frames))
        opened = opening(LineFile(path))
        _ = [next(opened) for _ in range(2000)]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            rest_of(LineFile(path), opened.state_dict())
        assert caplog.text.count("bytes are decompressed again to go on in it") == said


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    """Each flipped bit that changes a row, and each truncation, is an error."""
    content = b"".join(LINES[:40])
    good, path = packed(kind, content, 3), tmp_path / f"a.jsonl.{kind}"
    rng = random.Random(1)
    for _ in range(60):
        at = rng.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        with contextlib.suppress(ShardCorruptError):
            read = io.BufferedReader(FramesFile(path)).read()
            assert kind == "zst" or read == content  # every second zstd frame here has no checksum
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ShardCorruptError, match=r"is truncated within a frame"):
        io.BufferedReader(FramesFile(path)).read()


def test_what_is_not_read_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for name in ("a.tar.gz", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DatasetError, match=r"a\.tar\.gz must be a file of lines, got an archive\. Decompress it"):
        LineFile(tmp_path / "a.tar.gz")
    with pytest.raises(DatasetError, match=r"a\.jsonl\.gz must not be compressed.*LineFile\(path\)"):
        index_folder(tmp_path, "json_lines")
    (tmp_path / "a.jsonl.gz").unlink()
    with pytest.raises(DatasetError, match=r"a\.tar\.gz must not be compressed.*Decompress it first"):
        index_folder(tmp_path)
    (tmp_path / "json").mkdir()
    (tmp_path / "json/a.json").write_text("[]")
    with pytest.raises(
        DatasetError, match=r"has \.json files: name those of JSON lines \.jsonl to index them, or read"
    ):
        index_folder(tmp_path / "json")
    for name, content, words in (
        ("m.jsonl.zst", gzip.compress(b"{}"), r"compressed by gzip, which .* ends in \.gz"),
        ("n.jsonl", packed("zst", b"{}", 1)[13:], r"compressed by zstd, which .* ends in \.zst"),
        ("o.jsonl.bz2", bz2.compress(b"{}"), r"compressed by bzip2, .* Decompress it"),
        ("p.jsonl.xz", lzma.compress(b"{}"), r"compressed by xz, .* Decompress it"),
        ("q.tgz", gzip.compress(b"{}"), r"must be a file of lines, got an archive"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DatasetError, match=words):
            LineFile(tmp_path / name)
    learnt = zstandard.train_dictionary(1024, list(LINES))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor(dict_data=learnt).compress(LINES[0]))
    with pytest.raises(ShardCorruptError, match=r"compressed with a dictionary, .* Compress it without one"):
        next(opening(LineFile(tmp_path / "d.jsonl.zst")))
    (tmp_path / "c.csv").write_text("a,a\n1,2\n")
    with pytest.raises(ShardCorruptError, match=r"c\.csv: the first line must have the columns' names, each once"):
        opening(LineFile(tmp_path / "c.csv"))
    (tmp_path / "b.csv").write_text("a,b\n1\n")
    opened = opening(LineFile(tmp_path / "b.csv"))
    with pytest.raises(ShardCorruptError, match=r"b\.csv, byte 4: a row must have 2 values, got 1"):
        next(opened)
