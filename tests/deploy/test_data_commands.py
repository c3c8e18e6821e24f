"""`penstock data index`, `inspect`, `verify` and `convert`, as a user calls them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from penstock.data import MDSWriter
from penstock.deploy.cli.main import app


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def call(*arguments: str | Path) -> tuple[int, str]:
    done = run(*arguments)
    return done.exit_code, done.output


def asked(*arguments: str | Path) -> Any:
    done = run(*arguments, "--json")
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    for part in range(2):
        rows = [{"n": n, "text": "x" * 100} for n in range(part * 5, part * 5 + 5)]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_folder_is_indexed_shown_and_verified(lines: Path) -> None:
    counts = {"folder": str(lines), "formats": {"json_lines": 2}, "shards": 2, "samples": 10}
    code, found = asked("index", lines)
    assert (code, {name: found[name] for name in counts}) == (0, counts)
    assert found["bytes"] == sum(path.stat().st_size for path in lines.rglob("*.jsonl*"))  # with the offsets
    code, found = asked("inspect", lines, "--samples", "2")
    assert (code, found["columns"]) == (0, {"n": "int", "text": "str"})
    assert [sample["n"] for sample in found["first_samples"]] == ["0", "1"]
    assert len(found["first_samples"][0]["text"]) == 48
    found = asked("verify", lines)[1]
    assert (found["verified_by"], found["damaged"], "not_compared" in found) == ("all bytes", [], False)
    code, said = call("inspect", lines)
    assert (code, "samples: 10\n" in said, "columns: n: int, text: str\n" in said) == (0, True, True)


def test_damaged_files_are_named_each(lines: Path) -> None:
    call("index", lines)
    first = (lines / "0.jsonl").read_bytes()
    (lines / "0.jsonl").write_bytes(first.replace(b'"n"', b"'n'"))
    (lines / "1.jsonl").unlink()
    code, found = asked("verify", lines)
    assert code == 28
    assert [each["file"] for each in found["damaged"]] == ["0.jsonl", "1.jsonl"]
    assert "must be the file that was indexed, got another one" in found["damaged"][0]["error"]


def test_verify_says_what_it_compared(tmp_path: Path) -> None:
    """A change within equal footers and between the pieces is not found without hashes, and not said to be absent."""
    table = pa.table({"text": [f"A{row:06}" for row in range(20_000)]})
    options: dict[str, Any] = {"use_dictionary": False, "compression": None, "write_statistics": False}
    pq.write_table(table, tmp_path / "0.parquet", **options)
    first = (tmp_path / "0.parquet").read_bytes()
    for hashes, words in ((), "verified by: the footer\n"), (("--hashes",), "verified by: xxh3_128\ndamaged: none\n"):
        (tmp_path / "0.parquet").write_bytes(first)
        call("index", tmp_path, *hashes)
        assert (words in (said := call("verify", tmp_path)[1]), "--hashes" in said) == (True, not hashes)
        (tmp_path / "0.parquet").write_bytes(first.replace(b"A0", b"B0"))
        code, said = call("verify", tmp_path)
        assert ((code, "damaged: none found\n" in said) == (0, True)) if not hashes else (code == 28), said
    archive = tmp_path / "tars" / "0.tar"
    archive.parent.mkdir()
    with tarfile.open(archive, "w") as tar:
        for number in range(100):
            info = tarfile.TarInfo(f"{number:03}.txt")
            info.size = 2000
            tar.addfile(info, io.BytesIO(b"a" * info.size))
    call("index", archive.parent)
    changed = bytearray(archive.read_bytes())
    changed[9000] = ord("b")
    archive.write_bytes(changed)
    said = call("verify", archive.parent)[1]
    assert "verified by: 8 pieces of 4 KiB\nnot compared: other bytes of the files" in said
    assert said.endswith("damaged: none found\n")


def test_looking_writes_nothing(tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "made", {"n": "int"}, hashes=["sha1"], compression="zstd") as shards:
        shards.write({"n": 1})
    before = sorted(tmp_path.rglob("*"))
    assert asked("verify", tmp_path / "made")[1]["damaged"] == []
    assert asked("inspect", tmp_path / "made")[1]["first_samples"] == [{"n": "1"}]
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_is_converted_once(lines: Path, tmp_path: Path) -> None:
    call("index", lines)
    arguments = (
        "convert",
        lines,
        tmp_path / "made",
        "--to",
        "parquet",
        "--columns",
        "n",
        "--as",
        "n=int32",
        "--processes",
        "1",
    )
    code, found = asked(*arguments)
    assert (code, found["samples"], found["parts_made_now"], found["columns"]) == (0, 10, 1, {"n": "int32"})
    again = asked(*arguments)[1]
    assert (again["rows_digest"], again["parts_made_now"]) == (found["rows_digest"], 0)
    assert [sample["n"] for sample in asked("inspect", tmp_path / "made")[1]["first_samples"]] == ["0", "1", "2"]
    code, said = call("convert", lines, tmp_path / "made", "--to", "mds")
    assert (code, "must be empty, but it has a dataset" in said) == (28, True)
    options = ("--to", "mds", "--processes", "1", "--hashes", "sha1", "--size-limit", "100")
    assert not asked("convert", lines, tmp_path / "mds", *options)[0]
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    assert {tuple(shard["raw_data"]["hashes"]) for shard in index["shards"]} == {("sha1",)}
    assert len(index["shards"]) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--columns", "n", "--as", "text=str"], "types (--as) must be some of n, each once, got text"),
        (["--as", "n"], "--as must have the form NAME=VALUE, got 'n'"),
        (["--as", "n=int", "--as", "n=json"], "--as must have each name once, got 'n' twice"),
    ],
)
def test_wrong_arguments_are_named(lines: Path, tmp_path: Path, options: list[str], words: str) -> None:
    call("index", lines)
    code, said = call("convert", lines, tmp_path / "made", "--to", "mds", "--processes", "1", *options)
    assert (code, words in " ".join(said.split())) == (2, True), said
    assert not (tmp_path / "made").exists()


def test_sources_that_are_no_datasets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    for name, words in (
        ("file", "must be the folder of a dataset, got a file. Give the folder that has index.json"),
        ("none", "must be the folder of a dataset, got nothing"),
        ("folder", "must have index.json. Write it with `penstock data index"),
    ):
        code, said = call("verify", tmp_path / name)
        assert (code, words in said) == (28, True), said
